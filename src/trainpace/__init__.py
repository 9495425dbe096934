"""How long will this training take, what will it cost, why, and how do I make it faster?"""

__version__ = "0.1.0"
