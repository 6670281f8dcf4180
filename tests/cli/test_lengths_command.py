import json

import pytest

from commands import refused, run


@pytest.fixture
def six(tmp_path) -> str:
    (tmp_path / "lengths.txt").write_text("1\n2\n3\n3\n9\n16\n")
    return str(tmp_path / "lengths.txt")


def test_lengths_writes_table_json_and_page(six, tmp_path, capsys) -> None:
    files = {name: tmp_path / f"out.{name}" for name in ("json", "html")}
    options = [text for name, path in files.items() for text in (f"--{name}", str(path))]
    assert run("lengths", six, "--window", "16", "--window", "4", *options) == 0
    shown = capsys.readouterr().out
    assert "6 documents, 34 tokens" in shown
    assert "min 1, median 3, mean 5.7, p90 16, p99 16, max 16" in shown
    assert "half of the tokens lie in the 2 longest documents (33.3 %), of 9 tokens and more" in shown
    result = json.loads(files["json"].read_text())
    assert result["inputs"] == {"source": six, "unit": "tokens", "tokenizer": None}
    assert [result[key] for key in ("documents", "tokens", "attention_pairs", "median")] == [6, 34, 197, 3]
    longer = {"longer_documents": 2, "longer_tokens": 25, "tokens_beyond": 17}
    assert result["windows"][0] == {"window": 4, **longer, "attention_pairs_across": 120}
    assert "<html" in files["html"].read_text()[:200].lower()


@pytest.mark.parametrize(
    ("content", "more", "message"),
    [
        ("", [], "holds no lengths"),
        ("5\n0\n", [], "length 0 of document 1 is below 1"),
        ("5\n-3\n", [], "length -3 of document 1 is below 1"),
        ("five\n", [], "'five' is not a length"),
        ("5\n", ["--html", "no/such/folder/a.html"], "cannot write no/such/folder/a.html"),
        ("5\n", ["--json", "."], "cannot write ."),
    ],
)
def test_user_errors_are_one_line_and_exit_2(tmp_path, capsys, content, more, message) -> None:
    (tmp_path / "a.txt").write_text(content)
    assert message in refused(capsys, "lengths", str(tmp_path / "a.txt"), *more)
