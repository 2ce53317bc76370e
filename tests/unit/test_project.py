"""The project holds together: documents, errors, packaging."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from common import errors
from common.rpc.v1 import parameter_server_pb2 as pb

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_error_tree_the_exit_codes_page_and_the_drawing_agree():
    page = (ROOT / "docs/exit-codes.md").read_text()
    documented = dict(re.findall(r"^\| (\d+) \| `(\w+)`", page, flags=re.MULTILINE))
    leaves = {str(leaf.exit_code): leaf.status for leaf in errors.leaves()}
    assert documented == {"0": "completed"} | leaves
    drawn = dict(re.findall(r"(\w+) +(\d+)$", errors.__doc__, flags=re.MULTILINE))
    assert {status: str(code) for status, code in drawn.items()} == {status: code for code, status in leaves.items()}


def test_exit_codes_and_statuses_are_unique():
    leaves = list(errors.leaves())
    assert len({leaf.exit_code for leaf in leaves}) == len({leaf.status for leaf in leaves}) == len(leaves)
    assert errors.exit_code_of("completed") == 0


def test_the_public_names_of_the_error_tree_are_all_its_names():
    own = [name for name, value in vars(errors).items() if getattr(value, "__module__", "") == errors.__name__]
    assert sorted(own) == errors.__all__


def test_every_refusal_is_explained_in_the_protocols_document():
    document = (ROOT / "docs/protocol.md").read_text()
    kinds = [name for name in pb.RefusalKind.keys() if name != "REFUSAL_UNSPECIFIED"]  # noqa: SIM118 - an enum wrapper
    assert [name for name in kinds if f"`{name}`" not in document] == []


@pytest.mark.parametrize("target", re.findall(r"^make ([\w-]+)", README, flags=re.MULTILINE))
def test_every_make_command_of_the_readme_exists(target):
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^)#:]+)\)", README))))
def test_every_link_of_the_readme_leads_somewhere(link):
    assert (ROOT / link).exists()


def test_the_packages_and_their_data_are_listed_explicitly():
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert setuptools["packages"]["find"]["include"] == ["common*", "ps*", "client*", "adversary*", "deploy*"]


@pytest.mark.parametrize("module", ["common.rpc", "common.config", "deploy.cli", "ps.rounds", "ps.roster", "ps.store"])
def test_what_needs_no_torch_and_no_grpc_loads_neither(module):
    code = f"import sys, {module}; print([m for m in ('torch', 'grpc', 'torchvision') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert out.stdout.strip() == "[]"


def test_a_client_loads_no_torchvision():
    code = "import sys, client.main, adversary.main, ps.main; print('torchvision' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert out.stdout.strip() == "False"


def test_nothing_in_the_tree_names_a_path_of_a_developers_machine():
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    words = ["/" + "work/", "/" + "root/", "shared" + "/design", "algorithms" + ".md"]
    guilty = [
        (name, word)
        for name in files
        for word in words
        if (ROOT / name).is_file() and word.encode() in (ROOT / name).read_bytes()
    ]
    assert guilty == []


def test_nothing_unpickles():
    files = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    sources = {name: (ROOT / name).read_text() for name in files.split() if not name.startswith("tests/")}
    pattern = r"^\s*(import pickle|from pickle|import (dill|cloudpickle|joblib))|torch\.load\("
    assert [name for name, text in sources.items() if re.search(pattern, text, flags=re.MULTILINE)] == []


def test_every_rule_and_step_has_a_line_in_the_rules_document():
    from common.aggregation import BEFORE, RULES

    document = (ROOT / "docs/rules.md").read_text()
    assert [name for name in RULES if f"| `{name}` |" not in document] == []
    assert [name for name in BEFORE if f"`{name}`" not in document] == []
