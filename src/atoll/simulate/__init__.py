"""Many simulated sites on one machine, or on Ray: the round machine, store and arithmetic of a real run, no sockets.

Simulation             what users start: settings, sites, an engine                        simulation.py
  Conductor            joins sites, gives out rounds, takes updates, on the server's run   schedule_sites.py
    Engine             processes that train the sites                                    local_engine.py, ray_engine.py
      Station          in such a process: trains one site at a time                        train_sites.py
        SimulatedWorker  a site in one round: its base is the version's file itself,
                       and its outbox is the spool                                         site_session.py
          Script       what the user wrote                                                 script.py
"""
