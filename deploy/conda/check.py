"""Check the conda recipe: rattler-build knows every key of it, and renders it for each system."""

from pathlib import Path

from rattler_build import PlatformConfig, RenderConfig, Stage0Recipe, VariantConfig

RECIPE = Path(__file__).parent / "recipe.yaml"


def main() -> None:
    """Print what a package of each system would be called, and what it would need."""
    chosen = VariantConfig({"c_stdlib": ["sysroot"], "c_stdlib_version": ["2.28"]})  # as conda-forge chooses for all
    for platform in ("linux-64", "linux-aarch64", "osx-arm64"):
        config = RenderConfig(PlatformConfig(target_platform=platform, host_platform=platform))
        for variant in Stage0Recipe.from_file(str(RECIPE)).render(chosen, config):
            recipe = variant.recipe
            print(platform, recipe.package.name, recipe.package.version, *recipe.requirements.run, sep=" | ")


if __name__ == "__main__":
    main()
