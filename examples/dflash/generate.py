"""Continue a text with a target and a trained drafter, and measure what the drafter saves.

    python examples/dflash/generate.py --drafter runs/dflash-demo/drafter --prompt "def main("

The target decodes the same prompt with drafts and without, in turn, and both are timed. Exits with 0, or with 2 for options that
cannot work.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import data
import export
import serving
from config import BUNDLED_TARGET, Config, ConfigError
from speculative import Decoded, DFlashProposer, Sampling, acceptance_length, decode, regret, speculate
from target import Target, language_of, read_config, shape_of


@dataclass(frozen=True)
class Generated:
    """A response made with drafts, and the same one made without.

    Attributes:
        decoded: with drafts.
        alone: the target's own tokens, decoded without drafts.
        seconds, seconds_alone: wall time of each, the median over the repeats.
    """

    decoded: Decoded
    alone: list[int]
    seconds: float
    seconds_alone: float

    @property
    def speed_up(self) -> float:
        """How many times as many tokens a second come with drafts as without."""
        with_drafts, alone = len(self.decoded.tokens) / self.seconds, len(self.alone) / self.seconds_alone
        return with_drafts / alone


def load(
    target: Path, drafter: Path, device: torch.device, dtype: torch.dtype, *, trust_remote_code: bool
) -> tuple[Target, export.Exported]:
    """Read a drafter and its target, which taps what the drafter was trained on; both compute in ``dtype``.

    Raises:
        ConfigError: if one of them cannot be read, or they do not go together.
    """
    served = serving.read(drafter)
    config = read_config(target, trust_remote_code=trust_remote_code)
    shape = shape_of(config)
    serving.check_target(
        drafter, served, hidden_size=shape.hidden_size, layers=shape.layers, vocab_size=config.vocab_size
    )
    exported = export.load(drafter, device)
    exported.drafter.to(dtype)
    language = language_of(target, config, mask_id=served.mask_id, trust_remote_code=trust_remote_code)
    loaded = Target(target, served.taps, device, trust_remote_code=trust_remote_code, language=language, dtype=dtype)
    return loaded, exported


def generate(
    target: Target, exported: export.Exported, prompt: Tensor, new_tokens: int, sampling: Sampling, repeats: int
) -> Generated:
    """Decode a prompt, int64 ``[P]``, with drafts and without, ``repeats`` times in turn after one run of each that is not timed."""

    def with_drafts() -> Decoded:
        proposer = DFlashProposer(exported.drafter, target, exported.block_size)
        return speculate(target, proposer, prompt, new_tokens, sampling)

    def alone() -> list[int]:
        return decode(target, prompt, new_tokens, sampling)

    decoded, own = with_drafts(), alone()
    seconds = [(_seconds(with_drafts), _seconds(alone)) for _ in range(repeats)]
    return Generated(decoded, own, *(statistics.median(column) for column in zip(*seconds, strict=True)))


def _seconds(work: Callable[[], object]) -> float:
    """Return the wall time of ``work``, which ends with its tokens on the host."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def report(generated: Generated, block_size: int, temperature: float, repeats: int) -> list[str]:
    """Return the lines about a response."""
    decoded = generated.decoded
    tau = f"{acceptance_length(decoded.accepted):.2f}" if decoded.accepted else "-"
    tokens, alone = len(decoded.tokens), len(generated.alone)
    same = (
        "the same tokens as without drafts" if decoded.tokens == generated.alone else "OTHER tokens than without drafts"
    )
    speeds = f"{tokens / generated.seconds:.1f} with drafts, {alone / generated.seconds_alone:.1f} without"
    return [
        f"{tokens} tokens at temperature {temperature:g}, {same}",
        f"acceptance length {tau}, of {block_size} at most; target passes: {decoded.target_passes} instead of {alone}",
        f"tokens a second: {speeds}: {generated.speed_up:.2f} times as fast (median of {repeats} in turn)",
    ]


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Continue a text with a target and a trained drafter.")
    parser.add_argument(
        "--drafter", type=Path, required=True, help="its folder: a run's, an exported or a published one"
    )
    parser.add_argument(
        "--target", type=Path, default=BUNDLED_TARGET, help="Hugging Face folder of the target (the bundled one)"
    )
    parser.add_argument("--prompt", required=True, help="the text to continue")
    parser.add_argument("--new-tokens", type=int, default=128, help="longest response (%(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (%(default)s)")
    parser.add_argument(
        "--seed", type=int, default=0, help="what is drawn at a temperature follows from it (%(default)s)"
    )
    parser.add_argument("--repeats", type=int, default=3, help="how often each way is timed (%(default)s)")
    parser.add_argument("--device", default="auto", help="auto, cpu, or a GPU such as cuda:0 (%(default)s)")
    parser.add_argument("--dtype", choices=export.DTYPES, default="float32", help="what both compute in (%(default)s)")
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python code that comes with the target")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Return the exit code."""
    options = _options(arguments)
    try:
        device = Config(device=options.device).devices()[0]
        for name, least in (("new_tokens", 1), ("repeats", 1), ("temperature", 0)):
            if not getattr(options, name) >= least:
                raise ConfigError(f"{name} is {getattr(options, name)}, it must be at least {least}")
        target, exported = load(
            options.target,
            options.drafter,
            device,
            export.DTYPES[options.dtype],
            trust_remote_code=options.trust_remote_code,
        )
        prompt = target.language.encode(options.prompt.encode()).long().to(device)
        if not len(prompt):
            raise ConfigError("the prompt is empty: there is nothing to continue")
        noise = torch.rand(options.new_tokens, generator=data.generator(options.seed, "generate"))
        sampling = Sampling(options.temperature, noise.to(device))
        generated = generate(target, exported, prompt, options.new_tokens, sampling, options.repeats)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    text = target.language.decode(torch.tensor(generated.decoded.tokens))
    print(f"{options.prompt}{text}\n")
    print("\n".join(report(generated, exported.block_size, options.temperature, options.repeats)))
    if options.temperature == 0:
        found = regret(target, prompt, generated.decoded.tokens)
        print(f"largest distance of a token's logit from the largest one: {found.largest:.3g}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
