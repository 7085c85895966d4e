"""How the questions of each kind begin; the target writes the rest."""

FREE = ("",)
"""Half of the chats begin with nothing: the target chooses the subject."""

CHAT = (
    "What is", "How do I", "How can", "Why do", "Why is", "Can you explain", "Explain",
    "Tell me about", "Describe", "Compare", "What are the main differences between",
    "Write an email", "Write a letter to", "Write a short story about", "Write a poem",
    "Write a dialogue between", "Write a speech", "Give me ideas for", "Give me advice on",
    "Suggest", "List", "Plan", "Help me", "I want to learn", "I am planning", "My friend",
    "What would happen if", "Who was", "When did", "Where is", "Is it true that", "Imagine",
    "Pretend you are", "Create a recipe", "Summarise the history of", "What does the word",
    "Recommend", "Which is better", "What are the advantages of", "Discuss", "Argue", "Analyse",
    "Teach me", "Outline", "Draft a blog post about", "How does", "What causes", "Should I",
    "In what ways", "Give three examples of",
)  # fmt: skip

CODE = (
    "Write a Python function that", "Write a Python function to", "Write a Python class",
    "Write a Python program", "Write a Python script that reads", "Implement",
    "Implement a function in Python which", "Write a test for",
    "Complete this Python function:\n```python\ndef", "Fix the bug in this code:\n```python\ndef",
    "Explain what this code does:\n```python\n", "Write a JavaScript function",
    "Write an SQL query", "Write a C function", "Write a bash script",
    "Write a recursive function", "How do I sort a list in Python", "How do I parse",
    "Write a generator", "Write a regular expression", "Write a program that counts",
    "Refactor this code:\n```python\n", "Write a function that takes a list of",
    "Write a function that takes a string and returns",
    "Write a function with a docstring:\n```python\ndef", "Create a small web server",
    "Write a decorator", "Write a binary search", "Given a list of integers,",
    "Given two strings,", "Write a Python dictionary", "Convert this code to Python",
)  # fmt: skip

MATHEMATICS = (
    "A farmer has", "A train travels", "A shop sells", "Anna has", "Tom buys", "A class of",
    "There are", "If a", "Maria earns", "A baker makes", "How many", "What is the sum of",
    "Solve the equation", "Solve for x:", "Calculate", "Find the area of",
    "Find the probability that", "A rectangle has", "A car uses", "The price of", "Peter is",
    "In a school,", "A box holds", "Each week,", "Every day,", "A company", "Two friends",
    "Half of the", "A factory", "A bottle contains", "What percentage of", "Simplify",
    "Prove that", "A tank is filled", "Five workers", "Last year,", "A library has",
    "A recipe needs", "Sam reads", "Convert",
)  # fmt: skip

EDIT = (
    "Rewrite the following text:", "Correct the mistakes in the following text:",
    "Make this text more formal:",
    "Repeat the following text, with every number written as a word:", "Simplify this text:",
    "Improve this text:", "Rewrite the text below in the past tense:",
    "Add a title to the following text and keep the rest as it is:",
    "Copy this text and put headings above its parts:", "Edit the following text for clarity:",
    "Replace difficult words in this text by easier ones:", "Shorten the following text:",
    "Proofread this:", "Rewrite this for children:",
    "Return the following text with better punctuation:",
    "Change the following text as little as possible so that it reads well:",
)  # fmt: skip

EDIT_CODE = (
    "Add type hints to this code:", "Add comments to the following code:",
    "Rename the variables in this code:", "Refactor the following code:",
    "Write this code again with docstrings:", "Fix any bug in the following code:",
    "Make this function faster:", "Return this code with better names:",
)  # fmt: skip

DOCUMENT = (
    "Summarise the text above.", "What is the text above about?", "Continue the text above.",
    "Write the next function of this file.", "List the functions of the file above.",
    "Explain the code above.", "Write the beginning of the file above again.",
    "Which classes are defined above, and what do they do?",
    "Quote the most important lines of the text above.", "Write a test for the code above.",
    "How would you improve the text above?", "Write documentation for the code above.",
)  # fmt: skip
