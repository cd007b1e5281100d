"""Nothing is called ahead of a baseline that had to leave items out."""

from fairfold import simulate
from fairfold.cli.train import baselines_table
from fairfold.config import Settings
from fairfold.data.synthetic import SyntheticDataset
from fairfold.metrics.ranking import is_cut
from fairfold.metrics.tuned_baselines import STRONG_BASELINES, tuned_strong_baselines


def test_no_difference_from_a_cut_baseline() -> None:
    data = SyntheticDataset(users=60, items=80, interactions_per_user=20).dataset()
    beside = dict(tuned_strong_baselines(data, 20, largest=30, kinds=STRONG_BASELINES[:2]))
    result = simulate(Settings(), data=data, baselines=beside)  # type: ignore[arg-type]
    cut, whole = sorted(beside, key=is_cut, reverse=True)
    assert is_cut(cut)
    assert set(result.baselines) >= {cut, whole}
    assert cut not in result.differences
    assert whole in result.differences
    table = baselines_table(result)
    shown = dict(zip(table.columns[0].cells, table.columns[2].cells, strict=True))
    assert shown[cut] == "–"
    assert str(shown[whole])[0] in "+-"
