"""The table printer of the benchmarks: columns of fixed width, each row printed as soon as it is known."""

from __future__ import annotations


class Table:
    """A table whose columns are written as ``name|format``, for example ``rate|8.3f`` or ``machine|<19``."""

    def __init__(self, *columns: str) -> None:
        self.formats = [column.partition("|")[2] for column in columns]
        self.row(*(column.partition("|")[0] for column in columns))

    def row(self, *cells: object) -> None:
        """Print cells; a text stands in a column of numbers as it is, None as a dash."""
        print(" ", *map(self._cell, cells, self.formats), flush=True)

    @staticmethod
    def _cell(cell: object, form: str) -> str:
        if cell is None or isinstance(cell, str):
            form = form.split(".")[0].rstrip("%f")
            return f"{cell or '-':{form if form[0] in '<>^' else f'>{form}'}}"
        return f"{cell:{form}}"
