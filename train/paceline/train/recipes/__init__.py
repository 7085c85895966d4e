"""Recipes of training, one for each drafting method that is trained."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from paceline.drafter.methods import method_class, method_names
from paceline.drafter.methods.base import LoadError
from paceline.train.recipes.base import Recipe

__all__ = ["Recipe", "recipe_of", "recipes"]


def recipe_of(method: str) -> Recipe[Any] | None:
    """Return the recipe that a method names; None: it is not trained. Raises ``LoadError``: no such
    method, or it cannot be imported; ``ImportError``: its recipe cannot be imported."""
    module, _, name = method_class(method).recipe.partition(":")
    if not module:
        return None
    recipe: Recipe[Any] = getattr(import_module(module), name)()
    return recipe


def recipes() -> dict[str, Recipe[Any]]:
    """Return the recipes of all methods that can be imported, by method, in order."""
    by_method = {}
    for method in sorted(method_names()):
        try:
            recipe = recipe_of(method)
        except LoadError:
            continue
        if recipe is not None:
            by_method[method] = recipe
    return by_method
