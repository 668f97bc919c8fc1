"""Prompts whose answers say which tokens targets write: many kinds of task over many subjects.

None of them is of a benchmark. The second round works on answers of the first, so that texts to shorten,
translate or search are there without any from elsewhere.
"""

from collections.abc import Iterator
from itertools import cycle

__all__ = ["first_round", "second_round"]

SUBJECTS = """
volcanoes; the French Revolution; photosynthesis; black holes; sourdough bread; inflation and interest
rates; vaccines; the Roman Senate; electric cars; how a compiler works; chess openings; antibiotics; the
water cycle; jazz; public key cryptography; plate tectonics; supply and demand; the Silk Road; migraine;
solar panels; Shakespeare's tragedies; neural networks; the human heart; football tactics; bees and
pollination; the Cold War; mortgage contracts; the periodic table; ocean currents; Bayesian statistics;
coffee; railway history; the immune system; garden soil; copyright law; the Moon landings; sleep;
Buddhism; TCP congestion control; bridges and their loads; the stock market; dinosaurs; Japanese cooking;
child development; renewable energy; probability; the Ottoman Empire; operating system schedulers; wine;
earthquakes; job interviews; remote work; the Amazon rainforest; quantum mechanics; urban planning; first
aid; film editing; medieval castles; data privacy; marathon training
"""

TEXT_TASKS = (
    "Explain {subject} to a ten-year-old.",
    "Write a short news article of three paragraphs about {subject}.",
    "Give five practical tips about {subject}, as a numbered list.",
    "Write a blog post with headings in Markdown about {subject}.",
    "Compare two opposing views on {subject}, then give a balanced conclusion.",
    "Write an email to a colleague, Maria Keller, that proposes a workshop on {subject} next Thursday.",
    "Answer briefly: what are the three most important facts about {subject}, and since when are they known?",
    "Write a dialogue between a teacher and a curious student about {subject}.",
    "You are a museum guide. Introduce visitors to {subject} and keep them entertained.",
    "Write a short story in which {subject} plays a part. Use direct speech.",
    "Make a table in Markdown with four rows and three columns about {subject}.",
    "Describe causes and effects of changes in {subject} step by step.",
    "Who are important persons connected with {subject}? Name them with years and places.",
    "Write a poem of twelve lines about {subject}.",
    "Make three multiple-choice questions about {subject}, with the answers and reasons.",
    "Write an encyclopedia entry on {subject}, with numbers, names and dates.",
)

LANGUAGES = ("German", "French", "Spanish", "Chinese", "Italian", "Portuguese", "Russian", "Japanese")

CODE_LANGUAGES = (
    *("Python", "JavaScript", "TypeScript", "Java", "C++", "C", "Rust", "Go"),
    *("SQL", "Bash", "C#", "HTML and CSS", "Kotlin", "PHP"),
)

CODE_TASKS = """
parse command line options and print a usage text; read a CSV file and compute the mean of each column; a
least recently used cache with tests; breadth-first search over a grid; a small web server that returns
JSON; connect to a database and list the users of the last week; validate an email address; a binary
search tree with insertion and deletion; download a file with retries and a timeout; merge two sorted
lists; count words in a text and show the ten most frequent; a bank account class with deposits,
withdrawals and errors; a login form with checks; resize all images of a folder; quicksort with comments;
convert Roman numerals; a producer and a consumer with a queue; parse a log file and group errors by
hour; a matrix multiplication; a unit test for a date function; a decorator that measures time; find
duplicate files by hash; a linked list that can be reversed; a calculator for expressions with brackets;
draw a bar chart; a rate limiter; encode and decode base64; a state machine for a door; generate all
permutations; read a configuration file with defaults
"""

SUMS = """
A shop sells {a} notebooks for {b} dollars each and gives {c} percent off. What does a class of {d} pay?;
A train leaves at {c}:15 and drives {a} kilometres at {b} kilometres an hour. When does it arrive?; Tom
has {a} marbles, Lena {b} more. They give away {c} each. How many are left in all?; A rectangle is {a} cm
long and {b} cm wide. By what percentage does its area grow if both grow by {c} cm?; Solve for x: {a}x +
{b} = {c}x + {d}. Show every step.; In a group of {a} people, {b} like tea, {c} like coffee and {d} like
neither. How many like both?; A tank holds {a} litres. One pump fills {b} litres a minute, another drains
{c}. How long until it is full?; Find the derivative and the integral of f(x) = {a}x^3 - {b}x^2 + {c}.
Explain each step.; What is the probability of drawing {c} red balls in a row from {a} red and {b} blue
ones without putting back?; A worker earns {a} dollars a week and saves {c} percent. After how many weeks
are {d} hundred dollars saved?
"""

PROOFS = """
Compute the integral of x^{c} from 0 to {d} and write every step in LaTeX.; Prove that the sum of the first n
odd numbers is n^2. Use LaTeX.; Solve x^2 - {a}x + {b} = 0 with the quadratic formula and give the roots as
\\boxed{{...}}.; Let f(x) = {c}x + {d} and g(x) = x^2 - {b}. Find f(g({c})). End with "The answer is"
and the number.; How many positive divisors does {a} have? Think step by step.; Convert the point (0, {c}) in
rectangular coordinates to polar coordinates.; Factor {a} into primes, then say whether it is a perfect
square.; What is the remainder when {c}^{d} is divided by {b}?
"""

SHORT_TASKS = (
    "Answer in one sentence: what is most often misunderstood about {subject}?",
    "Name one famous place connected with {subject}. Answer with the name alone.",
    "Is this true or false, and why? Nobody has written a book about {subject}.",
    "Give a JSON object with the keys title, year, tags and summary for an article about {subject}.",
    "Which year and which person come to mind first about {subject}? Answer in at most ten words.",
    "Write three search queries that somebody interested in {subject} would type.",
)

ON_A_TEXT = (
    "Summarize the following text in two sentences.",
    "Translate the following text into English, or, if it is English, into {language}.",
    "Extract all names, numbers, dates and places from the following text as JSON.",
    "Rewrite the following text in a formal style and correct its mistakes.",
    "What does the following text say about reasons and consequences? Answer in one paragraph and quote it.",
    "Turn the following text into a list of key points.",
    "Write a reply to the author of the following text.",
    "Translate the following text into {language}.",
)


def first_round() -> Iterator[str]:
    """Prompts that stand by themselves; neighbours differ in kind."""
    subjects = [" ".join(subject.split()) for subject in SUBJECTS.split(";")]
    code = [" ".join(task.split()) for task in CODE_TASKS.split(";")]
    sums = [
        " ".join(task.split())
        for pair in zip(SUMS.split(";"), cycle(PROOFS.split(";")), strict=False)
        for task in pair
    ]
    texts, programs, short = cycle(TEXT_TASKS), cycle(CODE_LANGUAGES), cycle(SHORT_TASKS)
    for turn in range(3):
        for index, subject in enumerate(subjects):
            yield next(texts).format(subject=subject)
            if index % 2 == 0:
                task = code[(index // 2) % len(code)]
                yield f"Write this in {next(programs)}: {task}. Explain the code."
            if index % 2 == 1:
                yield next(short).format(subject=subject)
            if index % 3 == 1:
                number = 3 + 7 * index + 11 * turn
                values = {"a": number, "b": number % 37 + 2, "c": number % 9 + 2, "d": number % 83 + 20}
                yield sums[(index // 3 + 20 * turn) % len(sums)].format(**values)
            if index % 6 == 5:
                language = LANGUAGES[(index // 6 + turn) % len(LANGUAGES)]
                yield f"Write two paragraphs in {language} about {subject}."
        next(texts)  # so that the next turn pairs subjects and tasks differently


def second_round(texts: list[str]) -> Iterator[str]:
    """Prompts about texts of the first round."""
    tasks, languages = cycle(ON_A_TEXT), cycle(LANGUAGES)
    for text in texts:
        yield f"{next(tasks).format(language=next(languages))}\n\n{text}"
