"""The configs that are installed with the package, so that `draftsmith demo` works outside the repository."""
