"""What stands between an agent and the body of a tool that acts on the world; knows nothing of CrewAI."""
