"""What the user's code prints while it is tried on stand-ins is not shown; all else is."""

from __future__ import annotations

import sys
import threading

import pytest

from guava_nb.parallel.module_state import unheard


def test_what_a_trial_prints_is_dropped_and_what_other_threads_print_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    stream = sys.stdout
    with unheard():
        print("dropped")
        other = threading.Thread(target=print, args=("heard",))
        other.start()
        other.join()
        with unheard():
            print("dropped")
        print("dropped")
        assert sys.stdout.isatty() is False  # all but writing is the stream's own
    print("heard again")
    assert capsys.readouterr().out == "heard\nheard again\n" and sys.stdout is stream


def test_trials_of_two_threads_may_overlap_in_any_way(capsys: pytest.CaptureFixture[str]) -> None:
    stream, inside, go_on = sys.stdout, threading.Event(), threading.Event()

    def trial() -> None:
        with unheard():
            inside.set()
            assert go_on.wait(30)
            print("dropped")

    other = threading.Thread(target=trial)
    with unheard():
        other.start()
        assert inside.wait(30)
    print("heard")
    go_on.set()
    other.join()
    assert capsys.readouterr().out == "heard\n" and sys.stdout is stream


def test_an_error_in_a_trial_ends_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyError), unheard():
        raise KeyError
    print("heard")
    assert capsys.readouterr().out == "heard\n"
