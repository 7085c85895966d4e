"""Debug builds say where a table of a workspace is left."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from paceline.kernels import _compile

NATIVE = Path(_compile.__file__).with_name("native")
FLAGS = ("-O1", "-g", "-std=gnu11", "-fsanitize=address", "-DPACELINE_CHECK", f"-I{NATIVE}")

PROGRAM = """
#include <stdlib.h>
#include "parts.h"
#include "softmax.h"

/* Three tables of 10 rows of 10 floats, of which 8 are used. Writes one float of the second, or
 * hides the first columns of a row of scores. */
int main(int count, char **words) {
  Parts measured = {0};
  for (int i = 0; i < 3; i++) add_part(&measured, 400);
  Parts parts = {.memory = malloc(measured.bytes)};
  float *table[3], row[CHUNK + WIDTH];
  for (int i = 0; i < 3; i++) table[i] = add_part(&parts, 400);
  forbid_columns(table[1], 10, 10, 8);
  if (count == 2) table[1][atoi(words[1])] = 1.0f;
  if (count == 3) hide_columns(&(Scores){row, atoi(words[1]), atoi(words[2]), CHUNK});
  return 0;
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("gcc") is None:
        pytest.skip("no gcc")
    folder = tmp_path_factory.mktemp("parts")
    source, made = folder / "parts.c", folder / "parts"
    source.write_text(PROGRAM)
    command = ["gcc", *FLAGS, str(source), "-lm", "-o", str(made)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if "asan" in done.stderr:
        pytest.skip("gcc has no AddressSanitizer")
    assert done.returncode == 0, done.stderr
    return made


@pytest.mark.parametrize(
    ("words", "report"),
    [
        (["0"], ""),
        (["97"], ""),
        (["-1"], "use-after-poison"),
        (["100"], "use-after-poison"),
        (["8"], "use-after-poison"),
        (["98"], "use-after-poison"),
        (["0", "256"], ""),
        (["256", "256"], ""),
        (["273", "256"], "softmax.h"),
        (["0", "-1"], "softmax.h"),
    ],
)
def test_what_leaves_its_table_is_reported(program: Path, words: list[str], report: str) -> None:
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}
    done = subprocess.run(
        [str(program), *words],
        capture_output=True, text=True, timeout=60, check=False, env=environment,
    )  # fmt: skip
    assert (done.returncode == 0) == (not report), done.stderr
    assert report in done.stderr
