def add_options(p):
    pass


def main(o):
    return 0
