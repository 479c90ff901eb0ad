"""How low precision changes the numbers of a model: which op it hurts, and where bits are worth their cost."""
