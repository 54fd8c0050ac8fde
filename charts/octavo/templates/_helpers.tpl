{{- define "octavo.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "octavo.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" }}
{{- else }}
{{- $name := include "octavo.name" . }}
{{- if contains $name .Release.Name }}
{{- .Release.Name | trunc 63 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name $name | trunc 63 | trimSuffix "-" }}
{{- end }}
{{- end }}
{{- end }}

{{- define "octavo.selectorLabels" -}}
app.kubernetes.io/name: {{ include "octavo.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end }}

{{- define "octavo.labels" -}}
{{ include "octavo.selectorLabels" . }}
app.kubernetes.io/part-of: octavo
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "octavo.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "octavo.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- required "serviceAccount.name is needed with serviceAccount.create=false" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{- define "octavo.image" -}}
{{ .Values.image.repository }}:{{ default .Chart.AppVersion .Values.image.tag }}
{{- end }}

{{- define "octavo.engineImage" -}}
{{ .Values.engineImage.repository }}:{{ default .Chart.AppVersion .Values.engineImage.tag }}
{{- end }}

{{/* What the operator may do where InferenceServices live. One list for the ClusterRole and for the Roles. */}}
{{- define "octavo.rules" -}}
- apiGroups: [octavo.dev]
  resources: [inferenceservices]
  verbs: [get, list, watch]
- apiGroups: [octavo.dev]
  resources: [inferenceservices/status, inferenceservices/scale]
  verbs: [patch]
- apiGroups: [apps]
  resources: [deployments]
  verbs: [get, list, watch, create, patch]
- apiGroups: [apps]
  resources: [deployments/scale]
  verbs: [patch]
- apiGroups: [""]
  resources: [services, serviceaccounts]
  verbs: [get, list, watch, create, patch]
- apiGroups: [""]
  resources: [secrets] # the key of the private ports; read by name, never listed
  verbs: [get, create]
- apiGroups: [""]
  resources: [pods] # patch: what ending each would cost, before a scale-down
  verbs: [list, watch, patch]
- apiGroups: [""]
  resources: [events]
  verbs: [list, create]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch]
- apiGroups: [rbac.authorization.k8s.io]
  resources: [roles, rolebindings]
  verbs: [get, list, watch, create, patch]
- apiGroups: [discovery.k8s.io]
  resources: [endpointslices] # not read by the operator: it hands this right to routers, so it must have it
  verbs: [get, list, watch]
{{- end }}
