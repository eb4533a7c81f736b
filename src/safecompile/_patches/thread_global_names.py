"""The names that ``ThreadGlobals`` makes each thread's own."""

from __future__ import annotations

import inspect
from typing import Any

import torch.utils.checkpoint

from safecompile._patches.thread_globals import InModule, Made, Own

# None leaves it to the call; before torch 2.9 a call has no argument for it.
_EARLY_STOP = None if "early_stop" in inspect.signature(torch.utils.checkpoint.checkpoint).parameters else True

# What describes the calling thread: patch point, module, names with their value while nothing is traced, fault.
THREAD_GLOBALS: tuple[tuple[str, str, dict[str, Any], str], ...] = (
    (
        "fx-trace-state",
        "torch.fx._symbolic_trace",
        {"_is_fx_tracing_flag": False, "CURRENT_PATCHER": None},
        "a compiled call beside another thread's FX trace raises; overlapping traces break (E1, E3, P1; pytorch#126024)",
    ),
    (
        "compiling-flags",
        "torch.compiler",
        {"_is_compiling_flag": False, "_is_exporting_flag": False, "_is_non_strict_tracing_flag": False},
        "is_compiling() and is_exporting() are True in other threads' eager code (S6)",
    ),
    (
        "node-metadata",
        "torch.fx.traceback",
        dict.fromkeys(("should_preserve_node_meta", "_should_preserve_node_meta"), False)
        | {"current_meta": {}, "current_replay_node": None},
        "nodes get the metadata of another thread's trace",
    ),
    (
        "make-fx-tracer",
        "torch.fx.experimental.proxy_tensor",
        {
            "_CURRENT_MAKE_FX_TRACER": None,
            "CURRENT_DECOMPOSITION_TABLE": InModule(
                "torch.fx.experimental.proxy_tensor", "CURRENT_DECOMPOSITION_TABLE"
            ),
        },
        "a control-flow operator in one make_fx is traced into another thread's, with its decompositions (E3; pytorch#168042)",
    ),
    (
        "dispatch-mode-flags",
        "torch.utils._python_dispatch",
        dict.fromkeys(
            (
                "_is_in_torch_dispatch_mode",
                "_is_in_non_infra_torch_dispatch_mode",
                "_is_in_any_mode_without_ignore_compile_internals",
            ),
            False,
        ),
        "a compiled call runs eagerly in silence while another thread is in a dispatch mode",
    ),
    (
        "pre-dispatch-modes",
        "torch._ops",
        {"_mode_stack_state_for_pre_dispatch": Made("_ModeStackStateForPreDispatch")},
        '"Trying to pop empty mode stack" in concurrent exports (E3)',
    ),
    (
        "export-state",
        "torch.export._trace",
        {"_EXPORT_FLAGS": None, "_EXPORT_MODULE_HIERARCHY": None},
        "an export uses the module hierarchy of another thread's (E3)",
    ),
    (
        "error-on-graph-break",
        "torch._dynamo.utils",
        {"_error_on_graph_break": False},
        "a compile dies of a graph break because another thread has asked for that (S7; pytorch#196637)",
    ),
    (
        "checkpoint-knobs",
        "torch.utils.checkpoint",
        {"_enable_checkpoint_early_stop": _EARLY_STOP, "_checkpoint_debug_enabled": None},
        "early stopping and debugging are switched for checkpoints of other threads, and stay so (P2)",
    ),
    (
        "export-loading",
        "torch._export.serde.serialize",
        {"_CURRENT_DESERIALIZER": None},
        '"_CURRENT_DESERIALIZER is already set" when two threads load exported programs (E3)',
    ),
    (
        "fake-kernel-context",
        "torch._library.fake_impl",
        {"global_ctx_getter": Own("get_none")},
        "a custom operator's fake kernel makes the sizes of another thread's trace (E3)",
    ),
    (
        "generated-code",
        "torch.fx.graph_module",
        {"_forward_from_src": Own("_forward_from_src")},
        "modules traced beside a compile are never compiled, in silence (S5)",
    ),
    (
        "compiled-autograd-flags",
        "torch._dynamo.compiled_autograd",
        dict.fromkeys(
            (
                "compiled_autograd_enabled",
                "compiled_autograd_enabled_force_eager",
                "in_compiled_autograd_region",
                "active_disable_ctx",
            ),
            False,
        )
        | {"depth": 0},
        "a thread believes that its backward is compiled because another thread's is (E10)",
    ),
    (
        "lazy-graph-modules",
        "torch.fx._lazy_graph_module",
        {"_use_lazy_graph_module_flag": False, "_force_skip_lazy_graph_module_flag": False},
        "a trace beside a compile gives a graph module of another class",
    ),
)
