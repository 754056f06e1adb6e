"""Model the time of plans and jobs: closed forms, event and fluid simulation, selection of schedules."""
