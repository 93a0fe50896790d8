"""The pipeline as one supervised process, from one file: ``penstock pipeline run pipeline.toml``.

::

    pipeline.toml ──file──▶ settings ──process──▶ one session of Spark
                                                     │ parts
                                 ┌───────────────────┼──────────────────────┐
                               route     archive, again and again     optimize, vacuum, report:
                                 └───────────────────┼──────────────── one at a time, by the clock
                                                 supervisor: starts a part again that fails
                                                     │
                                                   pages: /health, /ready, /status, /metrics

``file`` reads the settings and says everything that is wrong with them before Spark starts;
``supervisor`` runs parts and knows neither Spark nor a server; ``parts`` are what they run.
"""
