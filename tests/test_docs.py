"""The pages in docs/: what they say of configuration keys is what the code says."""

from pathlib import Path

from flows.config_reference import config_reference

DOCS = Path(__file__).resolve().parents[1] / "docs"


def test_the_configuration_reference_is_the_code_s_own():
    assert (DOCS / "configuration.md").read_text() == config_reference()


def test_every_key_that_a_page_lists_stands_there_as_the_code_declares_it():
    reference = set(config_reference().splitlines())
    keys = {line.split("|")[1] for line in reference if line.startswith("| `")}
    wrong = [
        f"{page.name}: {line}"
        for page in sorted(DOCS.glob("*.md"))
        for line in page.read_text().splitlines()
        if line.startswith("| `") and line.split("|")[1] in keys and line not in reference
    ]
    assert wrong == []
