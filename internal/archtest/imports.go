package archtest

import (
	"fmt"
	"path"
	"slices"
	"strings"
)

// CheckTable finds rows that cannot be kept: a folder twice, a reason missing,
// an import of a row that is unknown or stands below.
func CheckTable(table []Row) []Violation {
	var found []Violation
	above := map[string]bool{}
	for _, row := range table {
		switch {
		case above[row.Dir]:
			found = append(found, Violation{Path: row.Dir, Text: "has two rows in the import table"})
		case row.Why == "":
			found = append(found, Violation{Path: row.Dir, Text: "its row in the import table gives no reason (Why)"})
		}
		for _, dir := range row.May {
			if !above[dir] {
				found = append(found, Violation{Path: row.Dir,
					Text: fmt.Sprintf("its row in the import table allows %s, which has no row above it", dir)})
			}
		}
		above[row.Dir] = true
	}
	return found
}

// CheckImports finds packages that the table does not know, imports that it
// does not allow, test-only code in production code, and cgo out of its place.
func CheckImports(tree *Tree, table []Row) []Violation {
	var found []Violation
	for _, pkg := range tree.Packages {
		at := slices.IndexFunc(table, func(r Row) bool { return r.Dir == pkg.Dir })
		if at < 0 {
			found = append(found, Violation{Path: pkg.Dir,
				Text: "is not in the import table; add a row to internal/archtest/table.go: what it may import, and why not more"})
			continue
		}
		for _, file := range pkg.Files {
			file.imports(func(importPath string, line int) {
				if text := importProblem(tree, table, at, file, importPath); text != "" {
					found = append(found, Violation{file.Path, line, text})
				}
			})
		}
	}
	return found
}

func importProblem(tree *Tree, table []Row, at int, file *File, importPath string) string {
	row := table[at]
	if importPath == "C" {
		if !slices.Contains(cgoDirs, path.Dir(file.Path)) {
			return fmt.Sprintf(`imports "C", which only %s may`, strings.Join(cgoDirs, " and "))
		}
		return ""
	}
	mayTest := file.Test || row.TestOnly
	for _, library := range testLibraries {
		if !mayTest && (importPath == library || strings.HasPrefix(importPath, library+"/")) {
			return fmt.Sprintf("imports %s, which is for tests, in production code", importPath)
		}
	}
	dir, ours := tree.ours(importPath)
	if !ours || dir == row.Dir || dir == "." {
		return ""
	}
	target := slices.IndexFunc(table, func(r Row) bool { return r.Dir == dir })
	if target < 0 {
		return fmt.Sprintf("imports %s, which is not in the import table (internal/archtest/table.go)", dir)
	}
	if table[target].TestOnly {
		if !mayTest {
			return fmt.Sprintf("imports %s, which is test-only, in production code", dir)
		}
		return ""
	}
	if row.Any || row.AllAbove && target < at || slices.Contains(row.May, dir) {
		return ""
	}
	return fmt.Sprintf("%s may not import %s: %s", row.Dir, dir, row.Why)
}
