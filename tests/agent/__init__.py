"""What an agent asks: an evaluation, and the server that answers."""
