"""Configs that ship with the package; a package so that nothing else is taken for it."""
