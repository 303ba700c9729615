"""The packages that are installed, and the extras that are complete."""

from __future__ import annotations

import platform
from importlib import metadata
from typing import TYPE_CHECKING

from packaging.requirements import Requirement

from semblend_trt.config import EmbedderKind
from semblend_trt.doctor.finding import Area
from semblend_trt.errors import ConfigurationError
from semblend_trt.semantic.sentence_model import sentence_model

if TYPE_CHECKING:
    from collections.abc import Iterator

    from semblend_trt.config import Settings
    from semblend_trt.doctor.finding import Finding

DISTRIBUTION = "semblend-trt"
_EXTRA_OF_EMBEDDER = {
    EmbedderKind.MINILM: "embedder",
    EmbedderKind.ONNX: "onnx",
    EmbedderKind.ONNX_GPU: "onnx-gpu",
}
_area = Area("software")


def software(settings: Settings | None) -> Iterator[Finding]:
    """Python, our own requirements and each extra; an extra that the settings need must be complete."""
    yield _area.ok(f"Python {platform.python_version()} on {platform.system()} {platform.machine()}")
    try:
        ours = metadata.distribution(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        yield _area.note(f"{DISTRIBUTION} is not installed as a package, so that its extras are not known")
        return
    needs = [Requirement(line) for line in ours.requires or ()]
    yield _base(ours.version, needs)
    for extra in sorted(set(ours.metadata.get_all("Provides-Extra") or ()) - {"dev"}):
        yield _extra(extra, needs, _user_of(extra, settings))


def embedder(settings: Settings) -> Iterator[Finding]:
    """Whether semantic neighbours are reported, and whether the sentence model of the settings is here."""
    if settings.embedder is EmbedderKind.OFF:
        yield _area.ok("SEMBLEND_EMBEDDER=off: no semantic neighbours are reported")
    extra = _EXTRA_OF_EMBEDDER.get(settings.embedder)
    if extra is None:
        if settings.embedder_model is not None:
            text = f"SEMBLEND_EMBEDDER_MODEL is set, but embedder {settings.embedder.value} runs no model"
            yield _area.note(text)
        return
    try:
        found = sentence_model(settings.embedder_model, settings.embedder.value, extra)
    except ConfigurationError as error:
        yield _area.failed(str(error))
    else:
        yield _area.ok(f"embedder {settings.embedder.value} runs the model in {found.folder}")


def _base(version: str, needs: list[Requirement]) -> Finding:
    wanted = [need for need in needs if _applies(need, "")]
    if missing := _missing(wanted):
        return _area.failed(f"{DISTRIBUTION} {version} cannot work: {', '.join(missing)}", missing=missing)
    versions = _versions(wanted)
    text = ", ".join(f"{name} {found}" for name, found in versions.items())
    return _area.ok(f"{DISTRIBUTION} {version} with {text}", versions={DISTRIBUTION: version, **versions})


def _extra(extra: str, needs: list[Requirement], user: str | None) -> Finding:
    wanted = [need for need in needs if _applies(need, extra) and not _applies(need, "")]
    versions = _versions(wanted)
    if missing := _missing(wanted):
        text = f"extra {extra} is not complete: {', '.join(missing)}"
        if user is None:
            return _area.note(text, extra=extra, missing=missing, versions=versions)
        text += f"; {user} needs it, install {DISTRIBUTION}[{extra}]"
        return _area.failed(text, extra=extra, missing=missing, versions=versions)
    text = ", ".join(f"{name} {found}" for name, found in versions.items())
    return _area.ok(f"extra {extra} is complete: {text}", extra=extra, versions=versions)


def _user_of(extra: str, settings: Settings | None) -> str | None:
    """The setting that does not work without the extra; None when none does."""
    if settings is None or not settings.enabled:
        return None
    if extra == "nats" and settings.nats_url is not None:
        return "SEMBLEND_NATS_URL"
    is_semantic = extra == "semantic" and settings.embedder is not EmbedderKind.OFF
    if is_semantic or extra == _EXTRA_OF_EMBEDDER.get(settings.embedder):
        return f"SEMBLEND_EMBEDDER={settings.embedder.value}"
    return None


def _applies(need: Requirement, extra: str) -> bool:
    return need.marker is None or need.marker.evaluate({"extra": extra})


def _versions(needs: list[Requirement]) -> dict[str, str]:
    return {need.name: found for need in needs if (found := installed(need.name)) is not None}


def _missing(needs: list[Requirement]) -> list[str]:
    missing = []
    for need in needs:
        found = installed(need.name)
        if found is None:
            missing.append(f"{need.name}{need.specifier} is missing")
        elif not need.specifier.contains(found, prereleases=True):
            missing.append(f"{need.name} is {found}, needed is {need.specifier}")
    return missing


def installed(name: str) -> str | None:
    """The version of a distribution; None without it."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
