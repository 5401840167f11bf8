"""What ``kvbaton doctor`` finds out: the machine, what each transport can do on it, and what dead processes left.

:mod:`~kvbaton.doctor.machine` reads, :mod:`~kvbaton.doctor.gpus` asks the driver, :mod:`~kvbaton.doctor.trial` lets two
processes move bytes, :mod:`~kvbaton.doctor.verdict` judges, :mod:`~kvbaton.doctor.leftovers` cleans.
"""
