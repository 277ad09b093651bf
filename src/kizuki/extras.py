"""Packages that only some of kizuki needs: what to say where one cannot be imported."""

from __future__ import annotations

# As they are imported; "" for an error that names nothing.
OPTIONAL_PACKAGES = {
    "",
    "pyarrow",
    "PIL",
    "anywidget",
    "traitlets",
    "starlette",
    "uvicorn",
    "regex",
    "safetensors",
}


def absent(error: ImportError | OSError, needs: str, extra: str, otherwise: str = "") -> str:
    """One line: `needs`, and the mend; a package that is there but does not load says so itself.

    >>> from kizuki.extras import absent
    >>> absent(ModuleNotFoundError("No module named 'pyarrow'"), "Parquet needs the package pyarrow", "survey")
    "Parquet needs the package pyarrow; pip install 'kizuki[survey]'"
    >>> absent(ModuleNotFoundError("No module named 'numpy.core'", name="numpy.core"), "Parquet needs pyarrow", "")
    "Parquet needs pyarrow, and what is here does not load: No module named 'numpy.core'"
    >>> absent(ImportError("pyarrow requires NumPy 2.0 or newer"), "Parquet needs the package pyarrow", "survey")
    'Parquet needs the package pyarrow, and what is here does not load: pyarrow requires NumPy 2.0 or newer'
    """
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] in OPTIONAL_PACKAGES:
        return f"{needs}; pip install 'kizuki[{extra}]'{otherwise}"
    why = (str(error).strip().splitlines() or ["it does not say why"])[0]
    return f"{needs}, and what is here does not load: {why}{otherwise}"
