"""Many sequences of a model at once in a paged cache: what comes of it is what transformers' own generate makes of each alone."""

import random

import pytest
import torch
from layer_fixtures import random_model

from ktopt.cache.paged import NoRoom, PagedCache, cannot_page, forward_paged
from ktopt.diagnostics import KtoptError, UsageError

UNFUSED = ["llama", "mistral", "qwen3", "qwen3_moe", "mixtral", "gemma3_text"]
PAGE = 16


@pytest.fixture(scope="module")
def llama():
    return random_model("llama")


def prompt(seed: int, length: int) -> list[int]:
    return (
        [random.Random(seed).randrange(3, 96) for _ in range(length)]
        if length < 40
        else prompt(seed, 39) + prompt(seed, length - 39)
    )


def expected(model, ids: list[int], count: int) -> list[int]:
    """By transformers."""
    out = model.generate(
        torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.int64), max_new_tokens=count, do_sample=False,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return out[0, len(ids) :].tolist()


class Run:
    """A request of these tests: reads its prompt in pieces, then decodes."""

    def __init__(self, cache: PagedCache, ids: list[int], count: int, piece: int) -> None:
        self.cache, self.ids, self.count, self.piece = cache, ids, count, piece
        self.sequence, self.made = cache.sequence(ids), []

    def next(self) -> list[int]:
        at = self.sequence.length
        return self.ids[at : at + self.piece] if at < len(self.ids) else self.made[-1:]

    def take(self, logits_V: torch.Tensor) -> None:
        if self.sequence.length >= len(self.ids):
            self.made.append(int(logits_V.argmax()))

    @property
    def done(self) -> bool:
        return len(self.made) >= self.count


def run_all(model, cache: PagedCache, waiting: list[tuple[list[int], int, int]], most: int = 3) -> list[list[int]]:
    """Requests (prompt, tokens to make, tokens of a piece), at most so many at once: each joins when another has left."""
    waiting, running, finished = list(enumerate(waiting)), {}, {}
    while waiting or running:
        while waiting and len(running) < most:
            number, request = waiting.pop(0)
            running[number] = Run(cache, *request)
        step = list(running.items())
        logits_NV = forward_paged(model, cache, [(each.sequence, each.next()) for _, each in step])
        for (number, each), logits_V in zip(step, logits_NV, strict=True):
            each.take(logits_V)
            if each.done:
                cache.release(each.sequence)
                finished[number] = running.pop(number).made
        cache.check()
    return [finished[number] for number in sorted(finished)]


@pytest.mark.parametrize("family", UNFUSED)
def test_sequences_that_join_and_leave_are_each_as_generate_makes_them(family):
    model = random_model(family)
    cache = PagedCache(model, tokens=20 * PAGE, page_tokens=PAGE)
    requests = [
        (prompt(1, 5), 9, 99),
        (prompt(2, 41), 5, 16),
        (prompt(3, 1), 20, 1),
        (prompt(4, 23), 3, 7),
        (prompt(5, 50), 12, 13),
    ]
    made = run_all(model, cache, requests)
    assert made == [expected(model, ids, count) for ids, count, _ in requests]
    assert cache.used_pages == 0


def test_a_prefix_that_an_earlier_sequence_left_is_taken_over_and_changes_nothing(llama):
    cache = PagedCache(llama, tokens=20 * PAGE, page_tokens=PAGE)
    shared = prompt(7, 3 * PAGE + 5)
    run_all(llama, cache, [(shared, 4, 99)])
    longer = [*shared[: 3 * PAGE], *prompt(8, 9)]
    sequence = cache.sequence(longer)
    assert sequence.cached_tokens == sequence.length == 3 * PAGE
    cache.release(sequence)
    assert run_all(llama, cache, [(longer, 8, 99)]) == [expected(llama, longer, 8)]


def test_a_prompt_that_is_there_whole_still_has_a_token_left_to_compute(llama):
    cache = PagedCache(llama, tokens=20 * PAGE, page_tokens=PAGE)
    ids = prompt(9, 2 * PAGE)
    first = run_all(llama, cache, [(ids, 3, 99)])
    again = cache.sequence(ids)
    assert again.cached_tokens == PAGE
    cache.release(again)
    assert run_all(llama, cache, [(ids, 3, 99)]) == first


def test_what_was_decoded_is_a_prefix_too(llama):
    cache = PagedCache(llama, tokens=20 * PAGE, page_tokens=PAGE)
    ids = prompt(10, PAGE)
    [made] = run_all(llama, cache, [(ids, PAGE + 3, 99)])
    sequence = cache.sequence([*ids, *made])
    assert sequence.cached_tokens == 2 * PAGE


def test_sequences_that_compute_the_same_at_once_end_with_one_copy_of_it(llama):
    cache = PagedCache(llama, tokens=20 * PAGE, page_tokens=PAGE)
    ids = prompt(11, 2 * PAGE + 3)
    one, two = cache.sequence(ids), cache.sequence(ids)
    logits = forward_paged(llama, cache, [(one, ids), (two, ids)])
    assert torch.equal(logits[0], logits[1])
    assert one.pages[:2] == two.pages[:2]
    assert one.pages[2] != two.pages[2]
    assert cache.used_pages == 4
    cache.check()


def test_a_fork_shares_whole_pages_and_goes_its_own_way(llama):
    cache = PagedCache(llama, tokens=20 * PAGE, page_tokens=PAGE)
    ids = prompt(12, 2 * PAGE + 3)
    one = cache.sequence(ids)
    forward_paged(llama, cache, [(one, ids)])
    two = cache.fork(one)
    assert cache.used_pages == 4
    assert two.cached_tokens == two.length == len(ids)
    for token in (5, 6, 7):
        logits = forward_paged(llama, cache, [(one, [token]), (two, [token + 20])])
    for row, rest in enumerate([[5, 6, 7], [25, 26, 27]]):
        whole = llama(torch.tensor([[*ids, *rest]])).logits[0, -1]
        assert (logits[row] - whole).abs().max() < 1e-5
    cache.check()
    cache.release(one)
    cache.release(two)
    assert cache.used_pages == 0
    assert cache.cached_pages == 2
    cache.check()


def test_what_does_not_fit_is_refused_with_the_numbers_and_changes_nothing(llama):
    cache = PagedCache(llama, tokens=4 * PAGE, page_tokens=PAGE)
    one, two = cache.sequence([1]), cache.sequence([2])
    cache.reserve(one, 3 * PAGE)
    assert cache.missing(two, PAGE + 1) == 2
    with pytest.raises(NoRoom, match=r"room for 16 more tokens \(1 of 4 pages of 16\), and 32 are needed") as caught:
        cache.reserve(two, PAGE + 1)
    assert (caught.value.needed, caught.value.free) == (2, 1)
    with pytest.raises(NoRoom):
        forward_paged(llama, cache, [(one, [1, 2]), (two, prompt(1, PAGE + 1))])
    assert (one.length, two.length, cache.used_pages) == (0, 0, 3)
    cache.reserve(one, 3 * PAGE)
    forward_paged(llama, cache, [(one, prompt(1, 39)), (two, prompt(1, PAGE))])
    cache.check()


def test_prefixes_make_room_the_longest_unused_first(llama):
    cache = PagedCache(llama, tokens=4 * PAGE, page_tokens=PAGE)
    old, new = prompt(1, PAGE + 1), prompt(2, PAGE + 1)
    run_all(llama, cache, [(old, 1, 99), (new, 1, 99)], most=1)
    run_all(llama, cache, [(old, 1, 99)])
    assert cache.cached_pages == 2
    sequence = cache.sequence([3])
    cache.reserve(sequence, 3 * PAGE)
    assert cache.cached_pages == 1
    assert cache.sequence(old).cached_tokens == PAGE
    assert cache.sequence(new).cached_tokens == 0
    cache.check()
    cache.clear()
    cache.check()


def test_after_an_error_in_a_step_sequences_have_what_they_had(llama, monkeypatch):
    cache = PagedCache(llama, tokens=8 * PAGE, page_tokens=PAGE)
    ids = prompt(3, PAGE + 3)
    sequence = cache.sequence(ids)
    forward_paged(llama, cache, [(sequence, ids[:7])])
    with monkeypatch.context() as patch:
        patch.setattr(llama.lm_head, "forward", lambda x: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            forward_paged(llama, cache, [(sequence, ids[7:])])
    assert sequence.length == 7
    cache.check()
    logits = forward_paged(llama, cache, [(sequence, ids[7:])])
    assert (logits[0] - llama(torch.tensor([ids])).logits[0, -1]).abs().max() < 1e-5
    assert llama.config._attn_implementation == "sdpa"


def test_misuse_is_told(llama):
    cache = PagedCache(llama, tokens=8 * PAGE, page_tokens=PAGE)
    sequence = cache.sequence([1, 2])
    for pieces in ([], [(sequence, [])], [(sequence, [1]), (sequence, [1])]):
        with pytest.raises(UsageError):
            forward_paged(llama, cache, pieces)
    cache.release(sequence)
    cache.release(sequence)
    with pytest.raises(UsageError, match="released"):
        forward_paged(llama, cache, [(sequence, [1])])
    with pytest.raises(UsageError, match="another model"):
        forward_paged(random_model("qwen3"), cache, [(cache.sequence([1]), [1])])


def test_the_memory_is_what_is_said(llama):
    cache = PagedCache(llama, tokens=5 * PAGE - 3, page_tokens=PAGE)
    assert cache.pages == 5
    assert cache.bytes_per_token == 3 * 2 * 2 * 16 * 4
    assert cache.nbytes == sum(held.nbytes for pool in cache.pools.values() for held in pool.memory)


def test_models_with_states_that_are_not_of_tokens_are_refused():
    from transformers import AutoModelForCausalLM, Qwen3NextConfig

    config = Qwen3NextConfig(
        vocab_size=96, hidden_size=64, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, layer_types=["linear_attention", "full_attention"], num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=32, shared_expert_intermediate_size=32, linear_num_value_heads=4, linear_num_key_heads=2,
        linear_key_head_dim=16, linear_value_head_dim=16,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    assert "linear_attention" in cannot_page(model)
    with pytest.raises(KtoptError, match="linear_attention"):
        PagedCache(model, tokens=64)
