"""What the tests of all engines share: a tiny model, agent sessions, and engines as processes of their own."""
