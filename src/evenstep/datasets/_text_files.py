"""Text files to tables, in which text stays text.

Not by the readers of `datasets`: their csv takes '' and 'NA' for missing and '01' for 1, and their
json takes some text for dates.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from evenstep.sections import Section

from pydantic import field_validator

DELIMITERS = {".csv": ",", ".tsv": "\t"}
JSON = (".jsonl", ".ndjson", ".json")
SUFFIXES = (*DELIMITERS, *JSON, ".txt")
LONGEST_FIELD = 2**31 - 1

Columns = dict[str, list[Any]]


class TextFilesConfig(Section):
    encoding: str = "utf-8"
    """Encoding of csv, tsv, json and txt files, for example latin-1."""

    @field_validator("encoding")
    @classmethod
    def _is_known(cls, encoding: str) -> str:
        try:
            "".encode(encoding)
        except LookupError as error:
            raise ValueError(f"{error}; such as utf-8, latin-1, cp1252, utf-16") from error
        return encoding

    columns: list[str] | None = None
    """Names of the columns of csv and tsv files without a header line; null: the first line names
    them."""

    quoted: bool | None = None
    """Whether fields of csv and tsv files may stand in double quotes, with line breaks within;
    null: in csv yes, in tsv no, where a quote is a character like any other."""

    sample_by: Literal["line", "paragraph", "document"] = "line"
    """What makes a row of a txt file: a line, what stands between empty lines, or all of it."""


def read(config: TextFilesConfig, files: Sequence[tuple[str, Path]]) -> Any:
    """The rows of (name, path) files as one `datasets.Dataset`; fields of csv and tsv are text.

    The name tells the format. Raises ValueError, with file and line, for what cannot be read.
    """
    import pyarrow as pa
    from datasets import Dataset, concatenate_datasets

    tables = []
    for name, path in files:
        try:
            tables.append(Dataset.from_dict(_columns(config, name, _decoded(config, name, path))))
        # The other two: a number of more than 64 bits, and half of a surrogate pair (\ud800).
        except (pa.ArrowException, OverflowError, UnicodeEncodeError) as error:
            raise ValueError(
                f"{name}: a column has values of several kinds, or that no table holds: {error}"
            ) from error
    try:
        return concatenate_datasets(tables)
    except ValueError as error:
        names = ", ".join(name for name, _ in files)
        raise ValueError(f"{names}: a column has values of another kind: {error}") from error


def _decoded(config: TextFilesConfig, name: str, path: Path) -> str:
    data = path.read_bytes()
    try:
        return data.decode(config.encoding).removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ValueError(
            f"{name}, line {line}: byte {error.start} of the file (0x{data[error.start]:02x}) is "
            f"not {config.encoding}; convert it, or set task.data.encoding, which is that of all "
            "files, for example task.data.encoding=latin-1"
        ) from error


def _columns(config: TextFilesConfig, name: str, text: str) -> Columns:
    suffix = suffix_of(name)
    if suffix in DELIMITERS:
        return _delimited(config, name, text, suffix)
    if suffix in JSON:
        rows = list(_objects(name, text))
        names = dict.fromkeys(key for row in rows for key in row)  # a row may lack some
        return {key: [row.get(key) for row in rows] for key in names}
    return {"text": _pieces(config, text)}


def suffix_of(name: str) -> str | None:
    """Of data.csv and of data.csv.gz: .csv; None for what is not read here."""
    suffixes = (suffix.lower() for suffix in reversed(Path(name).suffixes))
    return next((suffix for suffix in suffixes if suffix in SUFFIXES), None)


def _delimited(config: TextFilesConfig, name: str, text: str, suffix: str) -> Columns:
    rows = _fields(config, name, text, suffix)
    names = config.columns or next(rows, (0, []))[1]
    if len(set(names)) < len(names):
        raise ValueError(
            f"{name}: columns {names} are not all different; for a file without a header line "
            "set task.data.columns"
        )
    values: list[list[str]] = [[] for _ in names]
    for line, row in rows:
        if row == config.columns and not values[0]:
            raise ValueError(
                f"{name}, line {line} is a header line, {row}: leave out task.data.columns, which "
                "is for files without one"
            )
        if len(row) != len(names):
            raise ValueError(
                f"{name}, line {line}: {len(row)} fields where there are {len(names)} columns "
                f"({', '.join(names)})"
            )
        for column, value in zip(values, row, strict=True):
            column.append(value)
    return dict(zip(names, values, strict=True))


def _fields(
    config: TextFilesConfig, name: str, text: str, suffix: str
) -> Iterator[tuple[int, list[str]]]:
    """(number of its last line, fields) of each row that is not an empty line."""
    quoted = suffix == ".csv" if config.quoted is None else config.quoted
    csv.field_size_limit(LONGEST_FIELD)  # by default 131072 characters
    lines = csv.reader(
        io.StringIO(text, newline=""),
        delimiter=DELIMITERS[suffix],
        quoting=csv.QUOTE_MINIMAL if quoted else csv.QUOTE_NONE,
        strict=True,  # a quote that is never closed would swallow the rest of the file
    )
    try:
        yield from ((lines.line_num, row) for row in lines if row)
    except csv.Error as error:
        raise ValueError(
            f"{name}, line {lines.line_num}: {error}; if quotes mean nothing in this file, set "
            "task.data.quoted=false"
        ) from error


def _objects(name: str, text: str) -> Iterator[dict[str, Any]]:
    """The rows of a file of one object a line, or of one list of objects."""
    # Not splitlines, which also splits at characters that JSON leaves as they are.
    whole = text.lstrip().startswith("[")
    for number, part in enumerate([text] if whole else text.split("\n"), start=1):
        if not part.strip():
            continue
        try:
            found = json.loads(part)
        except json.JSONDecodeError as error:
            line = number + error.lineno - 1
            raise ValueError(f"{name}, line {line}: not JSON: {error.msg}") from error
        for row in found if whole else [found]:
            if not isinstance(row, dict):
                raise ValueError(f"{name}, line {number}: {row!r} is no object with columns")
            yield row


def _pieces(config: TextFilesConfig, text: str) -> list[str]:
    text = text.replace("\r\n", "\n")
    if config.sample_by == "document":
        return [text]
    pieces = text.split("\n" if config.sample_by == "line" else "\n\n")
    return [piece for piece in pieces if piece.strip()]
