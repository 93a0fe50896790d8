"""For tests of Penstock and of what is built on it.

* :mod:`penstock.testing.conformance`: the contract as a pytest suite; a store joins with one class.
* :mod:`penstock.testing.model` and :mod:`penstock.testing.machine`: a plain model of the contract,
  and a state machine that drives a store against it. Needs Hypothesis.
* :mod:`penstock.testing.auditor`: judges what clients of a store saw.
* :mod:`penstock.testing.stores`: stores that can be reopened, in memory too.

A program that uses Penstock needs none of this to test itself: ``penstock.open("memory:")`` with a
:class:`~penstock.clock.ManualClock` is a real broker.
"""
