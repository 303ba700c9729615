"""A changed method of an engine does what it did, is changed once, and is left as it was found."""

import pytest

from engine_wrapper.patches import AlreadyPatchedError, replace_method, replaced_method, watch_method


class Owner:
    def double(self, number, *, fails=False):
        if fails:
            raise ValueError("it fails")
        return 2 * number


def test_the_result_and_the_error_are_the_owners_and_both_are_noticed():
    owner, seen = Owner(), []
    undo = watch_method(owner, "double", lambda *found: seen.append(found))
    assert owner.double(4) == 8
    with pytest.raises(ValueError, match="it fails"):
        owner.double(5, fails=True)
    assert seen == [(8, 4), (None, 5)]
    undo()
    assert (owner.double(6), len(seen)) == (12, 2)
    assert not vars(owner)


def test_an_owner_without_the_method_is_refused():
    with pytest.raises(AttributeError, match="triple"):
        watch_method(Owner(), "triple", print)


def test_a_second_change_is_refused_until_the_first_is_undone():
    owner, other = Owner(), Owner()
    with replaced_method(owner, "double", lambda _: 1):
        for change in (replace_method, watch_method):
            with pytest.raises(AlreadyPatchedError, match=r"Owner\.double is replaced already"):
                change(owner, "double", print)
        assert (owner.double(3), other.double(3)) == (1, 6)
        assert owner.double.__func__ is not Owner.double  # a bound method, which vLLM's caches do not hold
    replace_method(owner, "double", lambda _: 2)
    assert owner.double(3) == 2


def test_a_method_of_the_object_itself_is_restored_and_a_later_one_is_kept():
    owner = Owner()
    owner.double = own = lambda _: 7
    undo = replace_method(owner, "double", lambda _: 8)
    undo()
    assert owner.double is own
    again = replace_method(owner, "double", lambda _: 8)
    owner.double = later = lambda _: 9
    again()
    assert owner.double is later
