package model

import (
	"embed"
	"fmt"
	"path"
	"sort"
	"strings"
)

//go:embed profiles/*.json
var bundled embed.FS

// Names lists the bundled profiles.
func Names() []string {
	entries, err := bundled.ReadDir("profiles")
	if err != nil {
		return nil
	}
	var names []string
	for _, e := range entries {
		names = append(names, strings.TrimSuffix(e.Name(), ".json"))
	}
	sort.Strings(names)
	return names
}

// Bundled returns the bundled profile of that name.
func Bundled(name string) (Profile, error) {
	data, err := bundled.ReadFile(path.Join("profiles", name+".json"))
	if err != nil {
		return Profile{}, fmt.Errorf("model: no profile is called %q: there are %s", name, strings.Join(Names(), ", "))
	}
	return Parse(data)
}
