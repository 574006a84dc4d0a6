"""The parts that tool and reasoning parsers are made of."""
