"""Calls of a function that a test watches, or has fail."""

from itertools import count


def watched(monkeypatch, owner, name, note):
    """A list that grows with every call by what `note` makes of its result and arguments."""
    found, stock = [], getattr(owner, name)

    def call(*arguments, **options):
        result = stock(*arguments, **options)
        found.append(note(result, *arguments, **options))
        return result

    monkeypatch.setattr(owner, name, call)
    return found


def failing(monkeypatch, owner, name, error, once):
    """Have a function raise at its first call, or at all; return what says whether it has."""
    sound, calls = getattr(owner, name), count(1)

    def fails(*arguments, **options):
        if next(calls) == 1 or not once:
            raise error("injected")
        return sound(*arguments, **options)

    monkeypatch.setattr(owner, name, fails)
    return lambda: next(calls) > 1
