"""What a test lets an end of a pair do."""


def regions(end, factor):
    return [factor * region.length for region in end.memory.regions]


def divide(end, by):
    return 1 / by


def tell(end, word):
    end.bell.sendall(bytes([word]))
    return "told"


def listen(end):
    return end.bell.recv(1)[0]
