"""Generation: a coded file gives the tokens that its source gives."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest

import lazyweights
from lazyweights.errors import CodecError, FormatError, LazyWeightsError

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed: pip install 'lazyweights[llama]'")

from lazyweights.llama.generation import Generation, context_size, prompt_tokens
from lazyweights.llama.memory_use import memory_use
from lazyweights.llama.model import Context, Model
from lazyweights.llama.sampler import Sampling

MODELS = Path(__file__).resolve().parents[2] / ".cache" / "models"
SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPT = b"the rain in an inn"

linux = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="only Linux has anonymous memory files")


def generate(
    path: Path, sampling: Sampling, n: int = 24, prompt: bytes = PROMPT, n_ctx: int = 128, threads: int = 1
) -> Generation:
    with Model(path, threads=threads) as model, Context(model, n_ctx=n_ctx, threads=threads) as context:
        generation = Generation(context, prompt_tokens(model, prompt), sampling, n)
        assert list(generation) == generation.tokens
    return generation


@linux
@pytest.mark.parametrize(
    "sampling",
    [Sampling(1, temp=0), Sampling(1), Sampling(2, top_k=0, top_p=1, min_p=0), Sampling(3, repeat_penalty=1.3, repeat_last_n=-1)],
    ids=str,
)
def test_same_tokens_from_a_coded_file(tiny: Path, tiny_coded: Path, sampling: Sampling) -> None:
    plain, coded = generate(tiny, sampling), generate(tiny_coded, sampling)
    assert coded.tokens == plain.tokens
    assert coded.stop == plain.stop
    assert plain.tokens


def test_the_seed_decides(tiny: Path) -> None:
    first = generate(tiny, Sampling(1, temp=2, top_k=0, top_p=1, min_p=0)).tokens
    assert generate(tiny, Sampling(1, temp=2, top_k=0, top_p=1, min_p=0)).tokens == first
    assert generate(tiny, Sampling(2, temp=2, top_k=0, top_p=1, min_p=0)).tokens != first
    assert generate(tiny, Sampling(1, temp=0)).tokens == generate(tiny, Sampling(2, temp=0)).tokens


def test_greedy_takes_the_largest_logit(tiny: Path) -> None:
    with Model(tiny, threads=1) as model, Context(model, n_ctx=128, threads=1) as context:
        tokens = prompt_tokens(model, PROMPT)
        expected: list[int] = []
        for _ in range(6):
            context.clear()
            context.decode(tokens, range(len(tokens)), [0] * len(tokens), [False] * (len(tokens) - 1) + [True])
            expected.append(int(context.logits(1)[0].argmax()))
            tokens = np.append(tokens, np.int32(expected[-1]))
    found = generate(tiny, Sampling(0, temp=0), 6)
    assert found.tokens == expected[: len(found.tokens)]
    assert found.tokens


def test_why_it_stops(tiny: Path) -> None:
    some = Sampling(1, temp=1.5, top_k=0)
    assert generate(tiny, some, 5).stop == "length"
    assert generate(tiny, some, 0).tokens == []
    ends = [generate(tiny, Sampling(seed, temp=3, top_k=0, top_p=1, min_p=0), -1, n_ctx=256) for seed in range(8)]
    assert {end.stop for end in ends} <= {"end", "context"}
    for end in ends:
        if end.stop == "context":
            assert len(end.tokens) == 256 - len(PROMPT.split()) or len(end.tokens) > 200


def test_long_prompt_goes_in_batches(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lazyweights.llama import generation

    whole = generate(tiny, Sampling(0, temp=0), 8)
    monkeypatch.setattr(generation, "PROMPT_BATCH", 5)
    assert generate(tiny, Sampling(0, temp=0), 8).tokens == whole.tokens


def test_special_tokens_and_empty_prompts(tiny: Path) -> None:
    with Model(tiny) as model:
        assert prompt_tokens(model, b"").tolist() == [model.bos]
        assert prompt_tokens(model, b"</s>").tolist() == [model.bos, 2]


def test_context_is_as_long_as_needed(tiny: Path) -> None:
    with Model(tiny) as model:
        assert model.n_ctx_train == 256
        assert context_size(model, 10, 20, None) == 256
        assert context_size(model, 10, -1, None) == 256
        assert context_size(model, 10, 20, 0) == 256
        assert context_size(model, 10, 20, 64) == 64
        with pytest.raises(LazyWeightsError, match="the prompt has 65 tokens and the context 64"):
            context_size(model, 65, 20, 64)


@linux
def test_damaged_file_does_not_load(tiny_damaged: Path) -> None:
    before = len(os.listdir("/dev/fd"))
    with pytest.raises((FormatError, CodecError)) as caught:
        Model(tiny_damaged)
    assert caught.value.tensor is not None
    assert len(os.listdir("/dev/fd")) == before


@linux
def test_what_is_no_model_says_why(tmp_path: Path) -> None:
    from tests.cli.conftest import model_bytes

    path = tmp_path / "m.gguf"
    path.write_bytes(model_bytes())
    lazyweights.encode(path)
    for name in (path, tmp_path / "m.gguf.lw"):
        with pytest.raises(LazyWeightsError, match=r"llama\.cpp cannot load this model: .*llama") as caught:
            Model(name)
        assert caught.value.path == str(name)


@linux
def test_load_llama(tiny: Path, tiny_coded: Path) -> None:
    import llama_cpp

    texts = []
    for path in (tiny, tiny_coded):
        before = len(os.listdir("/dev/fd"))
        llama = lazyweights.load_llama(path, n_ctx=64, n_threads=1, verbose=False)
        assert isinstance(llama, llama_cpp.Llama)
        assert len(os.listdir("/dev/fd")) <= before + 1  # llama-cpp-python keeps one for itself
        answer = llama(PROMPT.decode(), max_tokens=12, temperature=0.8, seed=5)
        assert answer["model"] == str(path)
        texts.append(answer["choices"][0]["text"])
        llama.close()
    assert texts[0] == texts[1]


@linux
def test_load_llama_of_a_damaged_file(tiny_damaged: Path) -> None:
    with pytest.raises((FormatError, CodecError)):
        lazyweights.load_llama(tiny_damaged, verbose=False)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the system does not tell")
def test_memory_use() -> None:
    use = memory_use()
    assert use is not None
    assert use.anonymous is not None
    assert use.peak >= use.anonymous > 1 << 20


@linux
@pytest.mark.real
def test_real_model(tmp_path: Path) -> None:
    source = MODELS / SMOLLM2
    if not source.is_file():
        pytest.skip(f"{SMOLLM2} is not in .cache/models; `make test` fetches it")
    coded = tmp_path / "m.lw"
    lazyweights.encode(source, coded, verify=False)
    prompt = b"<|im_start|>user\nName three colours.<|im_end|>\n<|im_start|>assistant\n"
    for sampling in (Sampling(1), Sampling(1, temp=0)):
        plain = generate(source, sampling, 16, prompt)
        assert generate(coded, sampling, 16, prompt).tokens == plain.tokens
        assert len(plain.tokens) > 3
