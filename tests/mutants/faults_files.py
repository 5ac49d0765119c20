"""Faults of what writes files, and of what looks at files of others."""

from __future__ import annotations

from edits import Rewrite, drop
from mutant import Mutant, tests_of

PATHS = "paths.py"
GUARD, FILES = "checkpoints/folder_guard.py", "checkpoints/safetensors_files.py"

writers = tests_of("trust/test_writers.py")
hostile = tests_of("hf/test_hf_hostile_folders.py")

FILE_FAULTS = [
    # -- written
    Mutant(
        "what killed writers left stays",
        PATHS,
        "_temporary_folder",
        Rewrite("parent.glob(_p)", "()"),
        writers("test_what_a_kill_leaves_goes_with_the_next_write"),
    ),
    Mutant(
        "folders of writers at work are removed",
        PATHS,
        "_lock",
        Rewrite("fcntl.flock(_h, _f)", "None"),
        writers("test_another_writer_at_work_is_left_alone"),
    ),
    Mutant(
        "temporary folders stay",
        PATHS,
        "_temporary_folder",
        drop("shutil.rmtree(folder, ignore_errors=True)"),
        writers("test_a_full_disk[plan-0.3]"),
    ),
    Mutant(
        "a file is replaced before it is on the disk",
        PATHS,
        "write_whole",
        drop("_sync(_f)"),
        writers("test_a_disk_that_fails[plan-fsync-5]"),
    ),
    Mutant("a cut line stays", PATHS, "append_line", drop("file.truncate(_s)"), writers("test_a_full_disk[measurements-0.7]")),
    # -- read
    Mutant(
        "any number of numbers is parsed",
        GUARD,
        "check_configuration",
        Rewrite('raw.count(b",") > MAX_VALUES', "False"),
        hostile("test_long_lists_of_numbers"),
    ),
    Mutant(
        "links lead anywhere",
        GUARD,
        "_check_kind",
        Rewrite("not any(_x) and not _u", "False"),
        hostile("test_only_regular_files_in_the_folder[config.json]"),
    ),
    Mutant(
        "any number of layers is made",
        GUARD,
        "check_layers",
        Rewrite("_n > most", "False"),
        hostile("test_more_layers_than_tensors_anywhere"),
    ),
    Mutant(
        "a header may be all of its file",
        FILES,
        "read_header",
        Rewrite("max(SMALL_HEADER, _s)", "MAX_HEADER"),
        hostile("test_a_header_that_is_most_of_its_file"),
    ),
    Mutant(
        "metadata of any type",
        FILES,
        "_check_text",
        Rewrite("all(isinstance(text, str) for text in texts)", "True"),
        hostile("test_metadata_of_another_type"),
    ),
]
