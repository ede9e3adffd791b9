"""Puts the configs that lightning_3d ships on Hydra's search path, after the user's own."""

from importlib.util import find_spec
from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


class Lightning3DConf(SearchPathPlugin):
    """Found by Hydra because it lies in `hydra_plugins`; makes `+layout@trainer.strategy=8gpu_tp2_pp2` work."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        # every Hydra program on the machine runs this: finding the package must not import it, and torch with it
        spec = find_spec("lightning_3d")
        for folder in spec.submodule_search_locations or () if spec else ():
            for conf in (Path(folder) / "conf", Path(folder).parent / "conf"):  # installed; in a checkout
                if (conf / "layout").is_dir():
                    search_path.append(provider="lightning-3d", path=conf.as_uri())
                    return
