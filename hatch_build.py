"""The wheel's build hook: the C++ step for every kind of CPU goes along, ready to load.

Called by hatchling alone (pyproject.toml names it). Without a compiler the wheel has the sources
only, and whoever installs it builds at the first run or is served by PyTorch. Editable installs
build nothing: they run from the checkout, which builds for itself.
"""

import sys
from pathlib import Path
from sysconfig import get_platform
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = "kernels/cpu/build"


class CustomBuildHook(BuildHookInterface):
    """Adds the libraries to a wheel, which then is one for this platform and any Python."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build them and say where they go; `version` is the kind of wheel that is asked for."""
        if version == "editable":
            return
        sys.path.insert(0, self.root)
        from kernels import native  # noqa: PLC0415  lies beside this file, on no path before

        try:
            files = native.prebuild(Path(self.root) / FOLDER)
        except native.NativeError as error:
            self.app.display_warning(f"a wheel without the C++ libraries: {error}")
            return
        build_data["force_include"] = {str(file): f"{FOLDER}/{file.name}" for file in files}
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{get_platform().replace('-', '_').replace('.', '_')}"
