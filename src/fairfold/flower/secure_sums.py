"""What is summed under masks beside answers to orders, as both sides derive it: qualities, surveys, segments."""

from collections.abc import Mapping

from fairfold.privacy.encoding import Encoding, Heard
from fairfold.privacy.encoding import Layout as Said
from fairfold.protocol.noising import spare_for
from fairfold.protocol.words import Answer
from fairfold.secure.layout import Layout
from fairfold.settings import Settings

WHOLE_STEPS, ITEM_STEPS = 16, 4_096  # steps that are 1 in a survey, of sums over a device and of sums by item


def segments_of(said: Said) -> Layout:
    """Segments and sizes as a secure sum has them; its sizes are those of ``said``, in their order."""
    segments = said.segments
    sizes = (tuple(n for n, segment in enumerate(segments) if size in segment.owners) for size in sorted(said.shapes))
    return Layout(tuple(len(segment) for segment in segments), tuple(sizes))


def judging(devices: int) -> Encoding:
    """What devices say of a model's quality, all in one sum."""
    return Encoding(Said({0: {}}), 1.0, devices)


def judged(quality: tuple[float, int] | None) -> Heard:
    """The quality that a device found, or nothing, as a summand."""
    total, users = quality or (0.0, 0)
    return Heard(Answer({}, 0.0), total, float(users))


def surveying(settings: Settings, window: range, devices: int) -> Encoding:
    """What devices say before the first round, of some items, all in one sum."""
    asked = settings.algorithm.surveys(settings)
    lengths: Mapping[str, int] = {
        name: len(window) if per_item else 3 for name, per_item in asked.items() if per_item or window.start == 0
    }
    usual = {name: ITEM_STEPS if per_item else WHOLE_STEPS for name, per_item in asked.items()}
    grids = usual | {name: of for name, of in settings.algorithm.survey_grids(settings).items() if name in asked}
    return Encoding(Said({0: lengths}), 1.0, devices, grids, spare_for(settings, grids, devices))
