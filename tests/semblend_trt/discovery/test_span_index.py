"""The index finds every run a brute-force search finds, and nothing else."""

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semblend_trt.discovery.fingerprint import GUARANTEED_RUN
from semblend_trt.discovery.span_index import Run, ScanBounds, SpanIndex

# Far above anything these small cases need, so that every run has to be found.
UNBOUNDED = ScanBounds(
    max_repeats=1 << 20, max_bucket=1 << 20, max_pairs=1 << 40, max_extensions=1 << 40, max_compared=1 << 40
)
SHORT_WORDS = st.integers(0, 2**32 - 1)


def random_tokens(rng: np.random.Generator, length: int, vocabulary: int = 32_000) -> np.ndarray:
    return rng.integers(0, vocabulary, length, dtype=np.int32)


def brute_force(donors: dict[str, np.ndarray], prompt: np.ndarray) -> set[Run]:
    """All maximal equal runs of GUARANTEED_RUN tokens and more, one diagonal after the other."""
    found = set()
    for donor_id, tokens in donors.items():
        for shift in range(1 - len(prompt), len(tokens)):
            length = 0
            for target in range(max(0, -shift), min(len(prompt), len(tokens) - shift) + 1):
                inside = target < len(prompt) and target + shift < len(tokens)
                if inside and prompt[target] == tokens[target + shift]:
                    length += 1
                    continue
                if length >= GUARANTEED_RUN:
                    found.add(Run(donor_id, target - length + shift, target - length, length))
                length = 0
    return found


def varied(runs: set[Run], prompt: np.ndarray) -> set[Run]:
    """Runs that are not one repeated token, which the index promises to find."""
    return {run for run in runs if len(set(prompt[run.target_start : run.target_end].tolist())) > 1}


def planted_case(seed: int, vocabulary: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Up to three donors and a prompt made of pieces of them, of noise and of repetition."""
    rng = np.random.default_rng(seed)
    donors = {
        f"donor-{i}": random_tokens(rng, int(rng.integers(0, 110)), vocabulary) for i in range(rng.integers(1, 4))
    }
    pieces = []
    for _ in range(int(rng.integers(1, 5))):
        kind = rng.integers(0, 4)
        source = donors[f"donor-{rng.integers(0, len(donors))}"]
        if kind == 0 or not len(source):
            pieces.append(random_tokens(rng, int(rng.integers(0, 40)), vocabulary))
        elif kind == 1:
            pieces.append(np.tile(random_tokens(rng, int(rng.integers(1, 5)), vocabulary), int(rng.integers(1, 15))))
        else:
            begin = int(rng.integers(0, len(source)))
            pieces.append(source[begin : begin + int(rng.integers(1, 90))])
    if rng.integers(0, 2):
        donors["repeating"] = np.concatenate(pieces[::-1])
    return donors, np.concatenate(pieces)


def index_of(donors: dict[str, np.ndarray], bounds: ScanBounds | None = UNBOUNDED, **kwargs: object) -> SpanIndex:
    index = SpanIndex(bounds, **kwargs)  # type: ignore[arg-type]
    for donor_id, tokens in donors.items():
        index.add("space", donor_id, tokens)
    return index


def assert_right(runs: list[Run], donors: dict[str, np.ndarray], prompt: np.ndarray) -> None:
    """Token-equal, maximal, long enough, each once, sorted."""
    assert len(set(runs)) == len(runs)
    assert runs == sorted(runs, key=lambda run: (run.target_start, -run.length, run.donor_id, run.donor_start))
    assert set(runs) <= brute_force(donors, prompt)


@settings(max_examples=50)
@given(SHORT_WORDS, st.sampled_from([2, 3, 8, 1000]))
def test_equals_brute_force(seed: int, vocabulary: int) -> None:
    donors, prompt = planted_case(seed, vocabulary)
    runs = index_of(donors).find("space", prompt)
    assert_right(runs, donors, prompt)
    assert varied(brute_force(donors, prompt), prompt) <= set(runs)


@settings(max_examples=60)
@given(SHORT_WORDS, st.sampled_from([2, 3, 1000]))
def test_answers_stay_right_within_tight_bounds(seed: int, vocabulary: int) -> None:
    donors, prompt = planted_case(seed, vocabulary)
    tight = ScanBounds(max_repeats=2, max_bucket=2, max_pairs=5, max_extensions=3)
    runs = index_of(donors, tight).find("space", prompt)
    assert_right(runs, donors, prompt)
    assert len(runs) <= 3


@pytest.mark.parametrize("hash_mask", [3 << 40, 0], ids=["four-hashes", "one-hash"])
@settings(max_examples=40)
@given(seed=SHORT_WORDS)
def test_forced_hash_collisions_change_no_answer(hash_mask: int, seed: int) -> None:
    donors, prompt = planted_case(seed, 50)
    runs = index_of(donors, hash_mask=hash_mask).find("space", prompt)
    assert_right(runs, donors, prompt)
    assert varied(brute_force(donors, prompt), prompt) <= set(runs)
    assert_right(index_of(donors, None, hash_mask=hash_mask).find("space", prompt), donors, prompt)


@settings(max_examples=60)
@given(SHORT_WORDS, st.data())
def test_removal_removes_and_leaves_the_others(seed: int, data: st.DataObject) -> None:
    donors, prompt = planted_case(seed, 3)
    index = index_of(donors)
    gone = data.draw(st.sets(st.sampled_from(sorted(donors))))
    for donor_id in gone:
        assert index.remove(donor_id)
        assert not index.remove(donor_id)
        assert donor_id not in index
    left = {donor_id: tokens for donor_id, tokens in donors.items() if donor_id not in gone}
    assert index.find("space", prompt) == index_of(left).find("space", prompt)
    for donor_id in gone:
        index.add("space", donor_id, donors[donor_id])
    assert index.find("space", prompt) == index_of(donors).find("space", prompt)
    assert len(index) == len(donors)


@settings(max_examples=30)
@given(SHORT_WORDS)
def test_other_namespaces_give_nothing_and_change_nothing(seed: int) -> None:
    donors, prompt = planted_case(seed, 3)
    index = index_of(donors, None)
    alone = index.find("space", prompt)
    assert index.find("elsewhere", prompt) == []
    # A crowd of equal donors in another namespace may not use up any bound of this one.
    for copy in range(100):
        index.add("elsewhere", f"foreign-{copy}", prompt)
    assert index.find("space", prompt) == alone
    assert index.find("", prompt) == index.find("space ", prompt) == []


def test_ids_are_one_for_all_namespaces_and_taken_once() -> None:
    index = SpanIndex()
    index.add("space", "donor", np.arange(100))
    for namespace in ("space", "elsewhere"):
        with pytest.raises(ValueError, match="donor is already indexed"):
            index.add(namespace, "donor", np.arange(50))
    assert index.find("space", np.arange(100)) == [Run("donor", 0, 0, 100)]
    assert index.find("elsewhere", np.arange(100)) == []


def test_the_index_keeps_its_own_copy() -> None:
    tokens = np.arange(100, dtype=np.int32)
    index = index_of({"donor": tokens})
    prompt = tokens.copy()
    tokens[:] = 0
    assert index.find("space", prompt) == [Run("donor", 0, 0, 100)]
    assert index.find("space", tokens) == []


def test_a_document_is_found_at_any_shift_in_any_of_many_donors() -> None:
    rng = np.random.default_rng(11)
    donors = {f"donor-{i}": random_tokens(rng, 2_000) for i in range(30)}
    index = index_of(donors, None)
    prompt = np.concatenate([random_tokens(rng, 777), donors["donor-4"][500:1900], donors["donor-9"][:1000]])
    assert index.find("space", prompt) == [Run("donor-4", 500, 777, 1400), Run("donor-9", 0, 2177, 1000)]


@pytest.mark.known_defect(33)
def test_boilerplate_in_every_donor_does_not_hide_a_document() -> None:
    rng = np.random.default_rng(12)
    boilerplate = random_tokens(rng, 400)
    documents = [random_tokens(rng, 600) for _ in range(300)]
    index = SpanIndex()
    for number, document in enumerate(documents):
        index.add("space", f"donor-{number}", np.concatenate([boilerplate, document]))
    runs = index.find("space", np.concatenate([boilerplate, documents[3]]))
    assert Run("donor-3", 0, 0, 1000) in runs
    assert len(runs) <= 4 * ScanBounds().max_bucket < len(documents)


@pytest.mark.parametrize("period", [1, 2, 7, 30])
def test_text_that_repeats_itself_is_found_whole_and_in_bounded_work(period: int) -> None:
    rng = np.random.default_rng(13)
    text = np.tile(random_tokens(rng, period), 8_000 // period)
    index = SpanIndex()
    for number in range(100):
        index.add("space", f"donor-{number}", np.concatenate([random_tokens(rng, number), text]))
    runs = index.find("space", np.concatenate([random_tokens(rng, 50), text]))
    assert max(run.length for run in runs) >= len(text)
    assert len(runs) <= ScanBounds().max_extensions


def test_a_run_of_one_token_is_found_as_far_as_the_shorter_stretch() -> None:
    index = index_of({"donor": np.full(500, 3)}, None)
    assert max(run.length for run in index.find("space", np.full(200, 3))) == 200
    assert max(run.length for run in index.find("space", np.full(900, 3))) == 500


@pytest.mark.parametrize("tokens", [[], [1] * 31, list(range(31))])
def test_short_prompts_and_donors_match_nothing(tokens: list[int]) -> None:
    index = index_of({"short": np.asarray(tokens, dtype=np.int32), "long": np.arange(100)})
    assert index.find("space", np.asarray(tokens, dtype=np.int32)) == []
    assert index.remove("short")


@pytest.mark.parametrize("tokens", [[-1] * 40, [2**31] * 40, [0.5] * 40])
def test_bad_token_ids_are_refused_and_nothing_is_kept(tokens: list[float]) -> None:
    index = SpanIndex()
    with pytest.raises(ValueError, match="token ids"):
        index.add("space", "donor", tokens)
    with pytest.raises(ValueError, match="token ids"):
        index.find("space", tokens)
    assert len(index) == 0


def test_readers_see_right_answers_while_one_writer_adds_and_removes() -> None:
    rng = np.random.default_rng(14)
    lasting, passing = random_tokens(rng, 400), random_tokens(rng, 400)
    index = index_of({"lasting": lasting})
    prompt = np.concatenate([passing, lasting])
    allowed = ([Run("lasting", 0, 400, 400)], [Run("passing", 0, 0, 400), Run("lasting", 0, 400, 400)])
    failures: list[object] = []
    stop = threading.Event()

    def read() -> None:
        try:
            while not stop.is_set():
                runs = index.find("space", prompt)
                if runs not in allowed:
                    failures.append(runs)
        except Exception as error:
            failures.append(error)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for _ in range(150):
        index.add("space", "passing", passing)
        index.remove("passing")
    stop.set()
    for reader in readers:
        reader.join()
    assert failures == []


def test_readers_find_every_published_donor_while_the_table_grows_many_times() -> None:
    """Buckets split and the directory doubles under the readers; a donor whose `add` has returned is always found."""
    rng = np.random.default_rng(15)
    donors = [random_tokens(rng, 3_000) for _ in range(400)]
    index = SpanIndex()
    published: list[int] = []
    failures: list[object] = []
    lookups: list[int] = []
    stop = threading.Event()

    def read(seed: int) -> None:
        choose = np.random.default_rng(seed)
        try:
            while not stop.is_set() or not lookups:
                if not published:
                    continue
                number = published[int(choose.integers(0, len(published)))]
                begin = int(choose.integers(0, 2_900))
                prompt = np.concatenate([random_tokens(choose, 50, 2**31 - 1), donors[number][begin : begin + 100]])
                runs = index.find("space", prompt, int(choose.choice([32, 64])))
                if runs != [Run(f"donor-{number}", begin, 50, 100)]:
                    failures.append((number, begin, runs))
                lookups.append(number)
        except Exception as error:
            failures.append(error)

    readers = [threading.Thread(target=read, args=(seed,)) for seed in range(3)]
    for reader in readers:
        reader.start()
    for number, donor in enumerate(donors):
        index.add("space", f"donor-{number}", donor)
        published.append(number)
        # Donors that come and go leave emptied slots and free pages behind.
        index.add("space", "passing", donor[::-1])
        index.remove("passing")
    stop.set()
    for reader in readers:
        reader.join()
    assert failures == []
    assert len(index) == 400


def test_a_run_is_cut_to_a_window() -> None:
    run = Run("donor", 10, 100, 50)
    assert run.within(0, 1000) == run
    assert run.within(120, 130) == Run("donor", 30, 120, 10)
    assert run.within(150, 200) is None
    assert run.within(0, 100) is None
