"""Calls of a function that a test watches."""


def watched(monkeypatch, owner, name, note):
    """A list that grows with every call by what `note` makes of its result and arguments."""
    found, stock = [], getattr(owner, name)

    def call(*arguments, **options):
        result = stock(*arguments, **options)
        found.append(note(result, *arguments, **options))
        return result

    monkeypatch.setattr(owner, name, call)
    return found
