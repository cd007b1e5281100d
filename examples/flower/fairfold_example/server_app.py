"""The app of the server: the settings, the sizes it serves, and the number of rounds."""

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fairfold import Settings
from fairfold.flower import FairStrategy

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    rounds = int(config["num-rounds"])
    settings = Settings(
        fleet={"capacities": str(config["capacities"]), "clients_per_round": None},
        run={"rounds": rounds, "evaluate_every": rounds},
    )
    strategy = FairStrategy(
        settings,
        num_items=int(config["num-items"]),
        folder=str(config["folder"]) or None,
        resume=bool(config["resume"]),
        half=bool(config["half-precision"]),
    )
    strategy.start(grid)
    for name, quality in (("start", strategy.start_quality), ("end", strategy.progress.history[-1].quality)):
        if quality is not None:
            print(f"{strategy.metric} at the {name}: {quality.server:.4f}")
