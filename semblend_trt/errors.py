"""Errors that callers may catch. Each message is one sentence: the value, the bound, and what to do."""


class SemBlendError(Exception):
    """Base of every error raised by this project."""


class ReasonedError(SemBlendError):
    """An error that is counted by its short name, `reason`."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class PlanError(ReasonedError, ValueError):
    """A reuse plan breaks the invariant that `reason` names."""


class NamespaceError(SemBlendError, ValueError):
    """A cache namespace cannot be built or read back."""


class ConfigurationError(SemBlendError, ValueError):
    """A setting or an argument is out of its range."""


class ProfileError(ReasonedError, ConfigurationError):
    """A reuse profile must not be used."""


class UnsupportedModelError(ReasonedError):
    """The model has a feature whose KV cannot be moved safely."""


class LayoutError(ReasonedError):
    """Plans cannot be executed on this engine."""


class DonorUnavailableError(SemBlendError):
    """A donor that a plan names is not held any more."""


class CapacityError(SemBlendError):
    """A store, pool or context is too small for what was asked."""
