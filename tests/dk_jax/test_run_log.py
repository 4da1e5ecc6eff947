"""What a run says of itself: a file with all of it, decisions about the machine on the console, once."""

import logging

from dk_jax.run_log import FILE, run_log


def test_decisions_are_told_once_and_the_file_has_everything(tmp_path, capfd):
    engine, phase = logging.getLogger("dk_jax.generation.engine"), logging.getLogger("dk_jax.train.rl_phase")
    with run_log(tmp_path):
        for _ in range(2):
            engine.info("memory: %d GB", 3)
        engine.info("memory: %d GB", 4)
        phase.info("skill a is dormant")
        engine.debug("nobody wants this")
    err = capfd.readouterr().err
    assert err.count("memory: 3 GB") == err.count("memory: 4 GB") == 1 and "dormant" not in err
    written = (tmp_path / FILE).read_text()
    assert written.count("memory: 3 GB") == 2 and "INFO dk_jax.train.rl_phase: skill a is dormant" in written and "nobody" not in written
    engine.info("after the end")
    assert (tmp_path / FILE).read_text() == written and "after" not in capfd.readouterr().err


def test_a_warning_is_in_the_file_and_not_told_twice(tmp_path, capfd):
    root, handler = logging.getLogger(), logging.StreamHandler()
    root.addHandler(handler)
    try:
        with run_log(tmp_path):
            logging.getLogger("dk_jax.generation").warning("cuDNN does not work")
            logging.getLogger("dk_jax.generation").info("a decision")
    finally:
        root.removeHandler(handler)
    err = capfd.readouterr().err
    assert err.count("cuDNN does not work") == 1 and err.count("a decision") == 1
    assert "WARNING dk_jax.generation: cuDNN" in (tmp_path / FILE).read_text()
