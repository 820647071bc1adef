"""What a model takes on each device of a mesh, and what crosses between them: without weights, and
without the devices."""
