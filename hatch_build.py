"""Build hook of the wheel: the CPU kernels, compiled ahead.

On x86-64 Linux with a C compiler the wheel holds them for all levels but plain C and is tagged
``linux_x86_64``: it runs where the system's C library is not older than the build machine's.
Elsewhere it is a pure wheel, and the kernels are compiled at the first start, as after an editable
install.
"""

import runpy
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.config import BuilderConfig
from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class KernelsHook(BuildHookInterface[BuilderConfig]):
    """Adds the libraries to the wheel and sets its tag."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile and choose the tag; ``version`` is "standard" or "editable"."""
        if version == "editable":
            return
        # By its path: importing its package would need torch.
        compiling = runpy.run_path(str(Path(self.root, "kernels/paceline/kernels/_compile.py")))
        self._folder = tempfile.TemporaryDirectory(prefix="paceline-kernels-")
        try:
            libraries = compiling["build_ahead"](Path(self._folder.name))
        except (OSError, ValueError) as error:
            self.app.display_warning(f"pure wheel, kernels compile at the first start: {error}")
            return
        for path in libraries:
            build_data["force_include"][str(path)] = f"paceline/kernels/prebuilt/{path.name}"
        build_data["pure_python"] = False
        build_data["tag"] = "py3-none-linux_x86_64"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Delete what was compiled: the wheel holds it."""
        if version != "editable":
            self._folder.cleanup()
