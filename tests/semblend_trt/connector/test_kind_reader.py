"""Texts are read in the background; without a tokenizer everything stays as it is."""

import numpy as np

from semblend_trt.connector.kind_reader import MAX_WAITING, KindReader, kind_reader_for
from semblend_trt.donors.block_kind import BlockKind
from semblend_trt.donors.eviction import Eviction


class Letters:
    def decode(self, ids):
        return "".join(map(chr, ids))


def ids(text):
    return np.frombuffer(text.encode("utf-32-le"), dtype=np.int32)


def test_text_is_read_with_the_tokenizer_that_is_loaded_once():
    loads = []
    reader = KindReader(lambda: loads.append(1) or Letters())
    reader.read("a", ids("System: be brief."))
    reader.read("b", ids("User: why?"))
    reader.drain()
    assert reader.known() == [("a", {BlockKind.SYSTEM_PROMPT: 1.0}), ("b", {BlockKind.USER_QUERY: 1.0})]
    assert (reader.known(), loads) == ([], [1])
    reader.close()


def test_without_a_tokenizer_nothing_is_known_and_nothing_is_tried_again():
    loads = []

    def fail():
        loads.append(1)
        raise OSError("no files")

    reader = KindReader(fail)
    for number in range(2 * MAX_WAITING):
        reader.read(str(number), ids("x"))
    reader.drain()
    reader.read("later", ids("x"))
    assert (reader.known(), len(loads)) == ([], 1)
    reader.close()


def test_only_policies_that_weigh_kinds_have_a_reader():
    assert kind_reader_for(Eviction.LRU, None) is None
    reader = kind_reader_for(Eviction.ADAPTIVE_SEMANTIC, None)
    assert reader is not None
    reader.close()
