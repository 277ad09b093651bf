// Language and theme: the visitor's choice if there is one, else what the browser says.

function recall(name) {
  try {
    return localStorage.getItem(`kizuki-${name}`);
  } catch {
    return null; // some browsers give a local file no storage
  }
}

export function rememberChoice(name, value) {
  try {
    localStorage.setItem(`kizuki-${name}`, value);
  } catch {
    // then the choice lasts as long as the page is open
  }
}

export function startLanguage() {
  const theme = recall("theme");
  if (theme === "dark" || theme === "light") document.documentElement.dataset.theme = theme;
  const language = recall("language");
  if (language === "en" || language === "ja") return language;
  return navigator.language.toLowerCase().startsWith("ja") ? "ja" : "en";
}

export function darkNow() {
  const { theme } = document.documentElement.dataset;
  return theme ? theme === "dark" : window.matchMedia("(prefers-color-scheme: dark)").matches;
}
