"""Which rounds of a run upload histories, and which validate a candidate of federated tuning."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TuningSchedule:
    """Which rounds upload nine tenths of the histories, which try a candidate, and which upload all."""

    first: int  # rounds before the first candidate
    num_candidates: int
    parts: int = 1  # rounds in which one upload is sent

    @classmethod
    def of(cls, rounds: int, wanted: int, parts: int = 1) -> "TuningSchedule":
        """Schedule as many candidates as leave an upload before them and one after; half of the others come before."""
        count = max(0, min(wanted, rounds - 2 * parts))
        return cls((rounds - count) // 2 if count else 0, count, parts)

    def part(self, round_number: int) -> int:
        """The part of the sum that is uploaded in a round."""
        return (round_number - (self.end if round_number >= self.end else 0)) % self.parts

    def uploads(self, round_number: int) -> bool:
        """Whether clients have news in a round that tries no candidate: all parts of what they had not sent before."""
        return round_number < self.parts or 0 <= round_number - self.end < self.parts

    def completes(self, round_number: int, rounds: int) -> bool:
        """Whether a round leaves no part of an upload to wait for before a model is solved for."""
        ends = round_number + 1 in (self.first, rounds) or self.candidate(round_number) is not None
        return ends or self.part(round_number) == self.parts - 1

    def candidate(self, round_number: int) -> int | None:
        """The candidate of a round; None where it tries none."""
        return round_number - self.first if self.first <= round_number < self.end else None

    @property
    def end(self) -> int:
        """The first round after the candidates."""
        return self.first + self.num_candidates
