"""Many simulated sites on one machine, or on Ray: the round machine, store and arithmetic of a real run, no sockets.

Simulation       what users start: settings, sites, an engine                          simulation.py
  Conductor      joins the sites, gives out rounds, takes updates: on the server's run  conductor.py
    Engine       processes that train simulated sites: jobs.py, local.py, on_ray.py
      Station    in such a process: one simulated site at a time                        station.py
        SimulatedSite    a site for one round: its base is the version's file itself,
                         and its outbox is the spool                                    site_session.py
          the script     what the user wrote                                            client.py
"""
