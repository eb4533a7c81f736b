"""``generate`` of one transformers model from several threads, its forward compiled: the tokens are those of eager."""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from safecompile import capture_context, statistics, thread_safe_compile

NEW = 8
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}


def main(backend: str) -> None:
    config = LlamaConfig(vocab_size=64, initializer_range=0.3, bos_token_id=None, eos_token_id=None, **SIZES)
    model = LlamaForCausalLM(config).eval()
    prompts = [torch.randint(64, (1, 4)) for _ in range(4)]

    def generate(prompt: torch.Tensor) -> list[int]:
        tokens: list[int] = model.generate(prompt, max_new_tokens=NEW, do_sample=False)[0].tolist()
        return tokens

    expected = [generate(prompt) for prompt in prompts]
    before = statistics().compiled
    thread_safe_compile(model, backend=backend, dynamic=True)  # the cache grows with each token
    with ThreadPoolExecutor(4, initializer=capture_context().apply) as pool:
        found = list(pool.map(generate, prompts))
    assert found == expected
    print(f"{len(found)} texts of {NEW} tokens by 4 threads, {statistics().compiled - before} graphs")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="eager", help="for torch.compile; inductor for real use")
    main(parser.parse_args().backend)
