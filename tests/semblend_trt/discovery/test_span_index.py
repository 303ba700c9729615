"""The index finds exactly the runs that brute force finds at a bounded cost; shared runs share anchors, and few."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numba
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semblend_trt.discovery import fingerprint as module
from semblend_trt.discovery import span_index
from semblend_trt.discovery.fingerprint import GRAM_TOKENS, GUARANTEED_RUN, as_token_array, fingerprint
from semblend_trt.discovery.span_index import AnchorTable, Run, ScanBounds, SpanIndex
from tests.semblend_trt.discovery.planning import index_of
from tests.semblend_trt.samples import text as random_tokens

# Far above anything these small cases need, so that every run has to be found.
UNBOUNDED = ScanBounds(*[1 << 40] * 6)
BOUNDS = ScanBounds()
ALL_BITS = (1 << 64) - 1


@numba.njit(cache=False)
def maximal_runs(donor, prompt, shortest):
    """All maximal equal runs, diagonal by diagonal: donor start, prompt start, tokens, whether the tokens differ."""
    runs = [(0, 0, 0, False)]
    for shift in range(1 - len(prompt), len(donor)):
        length, varied = 0, False
        for target in range(max(0, -shift), min(len(prompt), len(donor) - shift) + 1):
            inside = target < len(prompt) and target + shift < len(donor)
            if inside and prompt[target] == donor[target + shift]:
                varied = varied or (length > 0 and prompt[target] != prompt[target - 1])
                length += 1
                continue
            if length >= shortest:
                runs.append((target - length + shift, target - length, length, varied))
            length, varied = 0, False
    return runs[1:]


def random_case(rng, vocabulary, longest=150):
    """Up to three donors, and a prompt of pieces of them, of noise, of repetition and of one token."""
    donors = [random_tokens(rng, rng.integers(0, longest), vocabulary) for _ in range(rng.integers(1, 4))]
    pieces = [np.empty(0, dtype=np.int32)]
    for kind in rng.integers(0, 6, rng.integers(0, 5)):
        source = donors[rng.integers(0, len(donors))]
        if kind == 0 or not len(source):
            pieces.append(random_tokens(rng, rng.integers(0, 40), vocabulary))
        elif kind == 1:
            pieces.append(np.tile(random_tokens(rng, rng.integers(1, 5), vocabulary), rng.integers(1, 20)))
        else:
            begin = int(rng.integers(0, len(source)))
            pieces.append(source[begin : begin + int(rng.integers(1, 160))])
    if rng.integers(0, 2):
        donors.append(np.concatenate(pieces[::-1]))
    return donors, np.concatenate(pieces)


def assert_found(found, donors, prompt, shortest=32, *, every=True):
    """Runs are equal, maximal, long enough, each once and sorted; with `every`, only one repeated token is missed."""
    held = ((name, run) for name, donor in donors.items() for run in maximal_runs(donor, prompt, shortest))
    right = {Run(name, *run): varied for name, (*run, varied) in held}
    assert {run for run, varied in right.items() if varied and every} <= set(found) <= set(right)
    assert len(set(found)) == len(found)
    assert found == sorted(found, key=lambda run: (run.target_start, -run.length, run.donor_id, run.donor_start))


def assert_bounded(work, prompt, bounds=BOUNDS):
    """As `ScanBounds` says."""
    anchors = len(fingerprint(prompt).positions)
    assert work.places <= min(anchors * bounds.max_bucket, bounds.max_pairs)
    assert work.extensions <= max(bounds.max_extensions, len(prompt) // 32)
    assert work.compared <= bounds.max_compared + len(prompt) + 2


@pytest.mark.promise("reuse", "A look-up finds every run of...")
def test_of_text_that_many_donors_hold_few_places_are_compared_and_nothing_is_lost():
    """What no run covers of a run by brute force has no anchor: it is shorter than a guaranteed run."""
    rng = np.random.default_rng(4)
    document = random_tokens(rng, 600, 1000)
    donors = {"first": document[:90]}
    for number in range(60):
        begin = int(rng.integers(0, 300))
        part = document[begin : begin + int(rng.integers(60, 300))]
        donors[f"{number:02}"] = np.concatenate([random_tokens(rng, 20, 1000), part, random_tokens(rng, 20, 1000)])
    work = index_of(donors).find("space", document)
    found, alternatives = work.runs, BOUNDS.max_alternatives
    assert_found(found, donors, document, every=False)
    assert work.extensions < 3 * alternatives
    assert "first" in {run.donor_id for run in found}
    covered = np.zeros(len(document), dtype=bool)
    for run in found:
        covered[run.target_start : run.target_end] = True
    for donor in donors.values():
        for _, start, length, _ in maximal_runs(donor, document, 32):
            assert covered[start + 31 : start + length - 31].all()


@pytest.mark.promise(
    "reuse",
    "A look-up finds every run of at least `SEMBLEND_MIN_SPAN` tokens (32 at least) in donors of the same namespace, "
    "and in a few of those that hold the same text",
)
@pytest.mark.parametrize(("kept_bits", "indexes"), [(ALL_BITS, 8), (3 << 40, 5), (0, 3)])
def test_equals_brute_force_on_random_cases(monkeypatch, kept_bits, indexes):
    """Each index is shared by many cases in namespaces of their own, so adding and removing is tested along."""

    def colliding(*arguments):
        anchors = fingerprint(*arguments)
        return anchors._replace(hashes=anchors.hashes & np.uint64(kept_bits))

    monkeypatch.setattr(span_index, "fingerprint", colliding)
    rng = np.random.default_rng(indexes)
    runs = 0
    for _ in range(indexes):
        index = SpanIndex(UNBOUNDED)
        for case in range(80):
            space, shortest = f"space-{case}", int(rng.choice([32, 32, 33, 48, 64, 64, 100]))
            vocabulary, longest = int(rng.choice([2, 3, 8, 1_000, 2**31])), 400 if rng.integers(0, 20) == 0 else 150
            parts, prompt = random_case(rng, vocabulary, longest)
            donors = {f"{space}/{number}": part for number, part in enumerate(parts)}
            for donor_id, tokens in donors.items():
                index.add(space, donor_id, tokens)
            work = index.find(space, prompt, shortest)
            found = work.runs
            assert work.hidden_end == 0
            assert_found(found, donors, prompt, shortest)
            assert index.find("elsewhere", prompt, shortest).runs == []
            runs += len(found)
            # Every other case leaves its donors, which the later ones must not see.
            if case % 2:
                assert all(index.remove(donor_id) for donor_id in donors)
                assert index.find(space, prompt, shortest).runs == []
    assert runs > 14 * indexes


@pytest.mark.parametrize("seed", range(20))
def test_other_namespaces_give_nothing_and_change_nothing(seed):
    parts, prompt = random_case(np.random.default_rng(seed), 3)
    index = index_of({str(number): part for number, part in enumerate(parts)})
    alone = index.find("space", prompt).runs
    # A crowd of equal donors in another namespace may not use up any bound of this one.
    for copy in range(100):
        index.add("elsewhere", f"foreign-{copy}", prompt)
    assert index.find("space", prompt).runs == alone
    assert index.find("", prompt).runs == index.find("space ", prompt).runs == []


@pytest.mark.promise("reuse", "A document is found from token...")
def test_a_document_is_found_at_any_shift_in_any_of_many_donors():
    rng = np.random.default_rng(11)
    donors = {f"donor-{i}": random_tokens(rng, 2_000) for i in range(30)}
    prompt = np.concatenate([random_tokens(rng, 777), donors["donor-4"][500:1900], donors["donor-9"][:1000]])
    found = index_of(donors).find("space", prompt).runs
    assert found == [Run("donor-4", 500, 777, 1400), Run("donor-9", 0, 2177, 1000)]


@pytest.mark.known_defect(33)
def test_boilerplate_in_every_donor_does_not_hide_a_document():
    rng = np.random.default_rng(12)
    boilerplate = random_tokens(rng, 400)
    donors = {f"donor-{i}": np.concatenate([boilerplate, random_tokens(rng, 600)]) for i in range(300)}
    runs = index_of(donors).find("space", donors["donor-3"]).runs
    assert Run("donor-3", 0, 0, 1000) in runs
    assert len(runs) <= 4 * BOUNDS.max_bucket < len(donors)


@pytest.mark.parametrize("period", [1, 2, 7, 17, 30, 200])
def test_text_that_repeats_itself_is_found_whole_and_in_bounded_work(period):
    text = np.tile(random_tokens(5, period), 30_000 // period)
    donors = {f"donor-{i}": np.concatenate([random_tokens(10 + i, i), text]) for i in range(100)}
    prompt = np.concatenate([random_tokens(6, 333), text])
    work = index_of(donors).find("space", prompt)
    assert max(run.length for run in work.runs) >= len(text)
    for run in work.runs:
        donor = donors[run.donor_id][run.donor_start : run.donor_start + run.length]
        assert np.array_equal(donor, prompt[run.target_start : run.target_end])
    assert_bounded(work, prompt)


@pytest.mark.known_defect(17)
def test_tight_bounds_hold():
    bounds = ScanBounds(max_repeats=2, max_bucket=3, max_pairs=40, max_extensions=5, max_compared=500)
    text = random_tokens(7, 5_000)
    donors = {f"donor-{i}": np.concatenate([random_tokens(50 + i, i), text]) for i in range(30)}
    work = index_of(donors, bounds).find("space", text)
    assert 1 <= len(work.runs) <= 5
    assert_bounded(work, text, bounds)


@pytest.mark.parametrize("bounds", [ScanBounds(max_compared=100), ScanBounds(max_pairs=8)])
def test_what_a_bound_may_hide_is_told(bounds):
    prompt = np.concatenate([random_tokens(seed, length) for seed, length in ((3, 100), (1, 400), (4, 100), (2, 300))])
    donors = {"a": prompt[100:500], "b": prompt[600:]}
    work = index_of(donors, bounds).find("space", prompt, 64)
    assert [run.donor_id for run in work.runs] == ["a"]
    assert 850 < work.hidden_end <= 900


def test_places_that_were_left_out_hide_nothing_where_a_run_is_found_or_in_a_phrase():
    document, phrase = random_tokens(1, 400), random_tokens(2, 40)
    donors = {f"{i}": np.concatenate([random_tokens(10 + i, 30), document, phrase]) for i in range(9)}
    prompt = np.concatenate([document, random_tokens(3, 100), phrase, random_tokens(4, 100)])
    tight = ScanBounds(max_bucket=3)
    work = index_of(donors, tight).find("space", prompt, 64)
    assert {run.length for run in work.runs} == {400}
    assert work.hidden_end == 0


def test_ids_are_taken_once_for_all_namespaces_and_the_index_keeps_its_own_copy():
    tokens = np.arange(100, dtype=np.int32)
    index, prompt = index_of({"donor": tokens}), tokens.copy()
    tokens[:] = 0
    for namespace in ("space", "elsewhere"):
        with pytest.raises(ValueError, match="donor is already indexed"):
            index.add(namespace, "donor", tokens)
    assert index.find("space", prompt).runs == [Run("donor", 0, 0, 100)]
    assert index.find("space", tokens).runs == index.find("elsewhere", prompt).runs == []


def test_readers_find_every_published_donor_while_the_table_grows_many_times():
    """A donor whose `add` has returned is always found, and one that comes and goes is found wholly or not at all."""
    rng = np.random.default_rng(15)
    donors = [random_tokens(rng, 3_000) for _ in range(150)]
    passing = random_tokens(rng, 400)
    index, published, lookups, stop = SpanIndex(), [], [], threading.Event()

    def read(seed):
        choose = np.random.default_rng(seed)
        while not stop.is_set() or not lookups:
            if not published:
                continue
            number = published[int(choose.integers(0, len(published)))]
            begin = int(choose.integers(0, 2_900))
            prompt = np.concatenate([passing, random_tokens(choose, 50, 2**31 - 1), donors[number][begin:][:100]])
            runs = index.find("space", prompt, int(choose.choice([32, 64]))).runs
            there = Run(f"donor-{number}", begin, 450, 100)
            assert runs in ([there], [Run("passing", 0, 0, 400), there])
            lookups.append(number)

    with ThreadPoolExecutor(3) as pool:
        readers = pool.map(read, range(3))
        for number, donor in enumerate(donors):
            index.add("space", f"donor-{number}", donor)
            published.append(number)
            # Donors that come and go leave emptied slots and free pages behind.
            index.add("space", "passing", passing)
            index.add("space", "other", donor[::-1])
            index.remove("passing")
            index.remove("other")
        stop.set()
    list(readers)  # raises what failed in one of them
    assert len(index._donors) == 150


def test_a_donor_is_entered_before_any_lookup_asks():
    index = SpanIndex()
    index.add("space", "donor", np.arange(100))
    index._background.drain()
    assert index._donors["donor"].pages is not None


def test_an_index_without_room_goes_on_with_what_it_holds(monkeypatch):
    index, rng = SpanIndex(), np.random.default_rng(6)
    kept, more = rng.integers(0, 1000, (2, 4000))
    index.add("space", "kept", kept)
    index.settle()
    monkeypatch.setattr("semblend_trt.discovery.span_index._MOST_PAGES", index._table._pages)
    index.add("space", "more", more)
    assert index.find("space", more).runs == []
    assert [run.donor_id for run in index.find("space", kept).runs] == ["kept"]
    assert index.remove("more")
    assert index.remove("kept")
    index.add("space", "more", more)
    assert [run.donor_id for run in index.find("space", more).runs] == ["more"]


@pytest.mark.parametrize(("different", "most"), [(3, 4), (500, 3), (1 << 20, 2)])
def test_the_newest_places_of_each_key_are_found_through_any_change(different, most):
    rng = np.random.default_rng(different)
    pool = rng.integers(0, 1 << 64, different, dtype=np.uint64)
    table, held, donors = AnchorTable(), {}, {}
    for donor in range(400):
        count = int(rng.integers(0, 120))
        keys = rng.choice(pool, count)
        donors[donor] = keys, table.add(donor, keys, np.arange(count))
        for position, key in enumerate(keys.tolist()):
            held.setdefault(key, []).append((donor, position))
        while len(donors) > 100 or (donors and rng.random() < 0.3):
            gone = int(rng.choice(list(donors)))
            keys, pages = donors.pop(gone)
            table.remove(pages, keys)
            for key in set(keys.tolist()):
                held[key] = [place for place in held[key] if place[0] != gone]
        asked = np.unique(np.concatenate([rng.choice(pool, 20), rng.integers(0, 1 << 64, 5, dtype=np.uint64)]))
        *places, unread = (each.tolist() for each in table.find(asked, most, 1 << 20))
        found = list(zip(*places, strict=True))
        assert sorted(unread) == [at for at, key in enumerate(asked.tolist()) if len(held.get(key, [])) > most]
        for number, key in enumerate(asked.tolist()):
            newest = held.get(key, [])[::-1][:most]
            assert [place for which, *place in found if which == number] == [list(place) for place in newest]


def test_an_equal_key_of_another_namespace_nominates_nothing(monkeypatch):
    monkeypatch.setattr(SpanIndex, "_keys", lambda self, namespace_key, anchors: anchors.hashes)
    index, tokens = SpanIndex(), np.arange(100)
    for namespace in ("space", "elsewhere"):
        index.add(namespace, f"of {namespace}", tokens)
    assert index.find("space", tokens).runs == [Run("of space", 0, 0, 100)]


MAX_ID = 2**31 - 1


def every_anchor(tokens):
    return fingerprint(tokens, max_repeats=1 << 20)


def reference_sums(tokens, length):
    """Of every `length` tokens the polynomial in RANK_BASE modulo 2**32, of which 64 bits lose nothing."""
    sums = np.zeros(len(tokens) - length + 1, dtype=np.uint64)
    for column in np.lib.stride_tricks.sliding_window_view(tokens.astype(np.uint64), length).T:
        sums = (sums + column) * np.uint64(module.RANK_BASE) & np.uint64(0xFFFFFFFF)
    return sums.tolist()


def reference_positions(tokens, window):
    """Every minimum of every window of grams, for tokens without a stretch of one repeated token."""
    ranks = np.array(reference_sums(tokens, GRAM_TOKENS))
    if len(ranks) < window:
        return []
    windows = np.lib.stride_tricks.sliding_window_view(ranks, window)
    return np.unique(np.add(*np.nonzero(windows == windows.min(axis=1, keepdims=True)))).tolist()


@pytest.mark.parametrize("length", [GUARANTEED_RUN, GUARANTEED_RUN + 1, 64, 300, 6_000, 32_782, 32_783, 32_784, 33_000])
@pytest.mark.parametrize("vocabulary", [2, 50, MAX_ID + 1])
@pytest.mark.parametrize("shortest", [GUARANTEED_RUN, 47, module.WIDEST_RUN, 1_000])
def test_anchors_are_the_window_minima_and_those_for_longer_runs_some_of_the_others(length, vocabulary, shortest):
    tokens, halves = random_tokens(2, length, vocabulary), GRAM_TOKENS // 2
    anchors = fingerprint(tokens, 1 << 20, shortest)
    widest = min(shortest, module.WIDEST_RUN)
    assert anchors.positions.tolist() == reference_positions(tokens, widest - GRAM_TOKENS + 1) * (length >= widest)
    assert set(anchors.positions.tolist()) <= set(every_anchor(tokens).positions.tolist())
    sums = reference_sums(tokens, halves)
    assert anchors.hashes.tolist() == [sums[at] << 32 | sums[at + halves] for at in anchors.positions]


@pytest.mark.promise("reuse", "A look-up finds every run of...")
@given(
    st.integers(0, 2**32 - 1),
    st.integers(2, 4),
    st.integers(0, 40),
    st.integers(0, 40),
    st.integers(GUARANTEED_RUN, 80),
    st.booleans(),
)
def test_a_shared_run_keeps_the_same_anchor_wherever_it_stands(seed, vocabulary, left, right, length, wide):
    rng = np.random.default_rng(seed)
    run = rng.integers(0, vocabulary, length, dtype=np.int32)
    if len(set(run.tolist())) == 1:
        run[length // 2] += 1
    anchored = []
    for before, shortest in ((left, GUARANTEED_RUN), (right, length if wide else GUARANTEED_RUN)):
        noise = rng.integers(0, vocabulary, before, dtype=np.int32)
        anchors = fingerprint(np.concatenate([noise, run, noise]), 1 << 20, shortest)
        relative = anchors.positions - before
        inside = (relative >= 0) & (relative <= length - GRAM_TOKENS)
        anchored.append(set(zip(anchors.hashes[inside].tolist(), relative[inside].tolist(), strict=True)))
    assert anchored[0] & anchored[1]


@pytest.mark.parametrize("around", [0, 100])
@pytest.mark.parametrize("length", [GUARANTEED_RUN, 5_000, 100_000])
def test_a_stretch_of_one_token_is_anchored_at_its_ends_alone(length, around):
    text = random_tokens(4, around)
    anchors = fingerprint(np.concatenate([text, np.full(length, 99_999, dtype=np.int32), text]))
    last = around + length - GRAM_TOKENS
    assert [at for at in anchors.positions.tolist() if around <= at <= last] == sorted({around, last})


@pytest.mark.parametrize("max_repeats", [1, 2, 3, 8])
def test_thinning_keeps_the_first_and_last_of_each_hash(max_repeats):
    tokens = np.tile(random_tokens(5, 60), 9)
    anchors, thinned = every_anchor(tokens), fingerprint(tokens, max_repeats)
    last = max_repeats // 2
    for gram in set(anchors.hashes.tolist()):
        every = anchors.positions[anchors.hashes == gram].tolist()
        kept = thinned.positions[thinned.hashes == gram].tolist()
        ends = every[: max_repeats - last] + every[len(every) - last :]
        assert kept == (every if len(every) <= max_repeats else ends)


@pytest.mark.parametrize("bad", [[-1], [MAX_ID + 1], [0.5], ["a"], [[1, 2]], 7, [True]])
def test_bad_token_ids_are_refused(bad):
    with pytest.raises(ValueError, match=r"token id|shape"):
        as_token_array(np.asarray(bad))


@pytest.mark.parametrize(
    "good", [[], [0, MAX_ID], np.arange(6, dtype=np.int64)[::2], (1, 2, 3), np.frombuffer(bytes(8), dtype=np.int32)]
)
def test_good_token_ids_become_contiguous_int32(good):
    array = as_token_array(good)
    assert array.dtype == np.int32
    assert array.flags.c_contiguous
    assert array.tolist() == [int(token) for token in good]


@pytest.mark.parametrize("seed", range(40))
def test_texts_behind_each_other_have_the_anchors_that_each_has_alone(seed):
    rng = np.random.default_rng(seed)
    lengths = rng.choice([0, 5, 31, 32, 33, 60, 200, 700, 33_000 if seed % 10 == 0 else 9], rng.integers(1, 9))
    texts = [random_tokens(rng.integers(1 << 32), length, int(rng.choice([1, 2, 3, 1_000]))) for length in lengths]
    texts = [np.tile(text, 4) for text in texts] if seed % 3 == 0 else texts
    ends = np.cumsum([len(text) for text in texts])
    every = fingerprint(np.concatenate(texts), ends=ends[:-1])
    stops = np.searchsorted(every.positions, ends)
    for text, start, end, stop in zip(texts, [0, *stops], ends, stops, strict=False):
        alone = fingerprint(text)
        assert every.hashes[start:stop].tolist() == alone.hashes.tolist()
        assert (every.positions[start:stop] - (end - len(text))).tolist() == alone.positions.tolist()
