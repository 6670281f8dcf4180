"""Put the planner into other people's trainers, one framework a file."""
