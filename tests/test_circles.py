"""No modules import each other in a circle, under TYPE_CHECKING and in functions included; only
those of the kernels do. `make imports` has the rules between packages, for imports that run."""

from graphlib import TopologicalSorter

import grimp

KERNELS = "paceline.kernels"


def _node(module: str) -> str:
    """The kernels are one node of the graph."""
    return KERNELS if module.startswith(f"{KERNELS}.") else module


def test_no_modules_import_each_other() -> None:
    graph = grimp.build_graph("paceline", cache_dir=None)
    imports: dict[str, set[str]] = {}
    for module in graph.modules:
        imported = map(_node, graph.find_modules_directly_imported_by(module))
        imports.setdefault(_node(module), set()).update(imported)
    imports[KERNELS].remove(KERNELS)
    TopologicalSorter(imports).prepare()  # raises CycleError, with the circle
